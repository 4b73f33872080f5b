"""Leaves of a value and their sites."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from detaudit.hooks.tree import MAX_DEPTH, PACKED_LENGTH, Opaque, flatten

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    ids: Tensor
    mask: Tensor | None = None


@dataclasses.dataclass(slots=True)
class Slotted:
    ids: int


class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dict whose items are attributes, too."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class DynamicCache:
    """As in transformers: layers, each with keys and values; empty at first."""

    def __init__(self) -> None:
        self.layers: list[CacheLayer] = []


class CacheLayer:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.is_initialized = True


class Holder:
    """No cache by name, but it holds a tensor."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def read(self) -> Any:
        return self.state


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("keep out")


def leaves(value: object) -> dict[str, object]:
    found = list(flatten(value, "x"))
    assert len({site for site, _ in found}) == len(found), "two leaves at one site"
    return dict(found)


T = torch.zeros(1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (T, ["x"]),
        (3, ["x"]),
        ((T, [1, T]), ["x[0]", "x[1][0]", "x[1][1]"]),
        ({"a": T, "b c": T, 7: T, ("k", 1): T}, ["x.a", "x['b c']", "x[7]", "x[('k', 1)]"]),
        (Pair(T, {"z": 1}), ["x.left", "x.right.z"]),
        (Batch(T), ["x.ids", "x.mask"]),
        (Slotted(1), ["x.ids"]),
        (ModelOutput(logits=T, cache=(T,)), ["x.logits", "x.cache[0]"]),
        (UserDict({"a": T}), ["x.a"]),
        (deque([T]), ["x[0]"]),
        (torch.Size([2, 3]), ["x[0]", "x[1]"]),
        (Holder([T]), ["x.state[0]"]),
        (Holder({"k": T}), ["x.state.k"]),
        ((), []),
        ({}, []),
    ],
)
def test_sites(value: object, expected: list[str]) -> None:
    assert list(leaves(value)) == expected


def test_cache_objects_are_looked_into_before_and_after_they_are_filled() -> None:
    cache = DynamicCache()
    assert leaves(cache) == {}
    cache.layers.append(CacheLayer(T))
    assert leaves(cache) == {"x.layers[0].keys": T, "x.layers[0].is_initialized": True}


def test_the_order_of_a_dict_does_not_matter() -> None:
    assert leaves({"a": 1, "b": 2}) == leaves({"b": 2, "a": 1})


def test_keys_that_have_only_an_address_are_told_apart_by_position() -> None:
    assert list(leaves({object(): 1, object(): 2})) == ["x[#0]", "x[#1]"]


def test_cycles_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert leaves(loop) == {"x[0]": 1}
    table: dict[str, Any] = {"t": T}
    table["self"] = table
    assert leaves(table) == {"x.t": T}


def test_a_value_met_twice_is_a_leaf_twice() -> None:
    shared = [T]
    assert list(leaves([shared, shared])) == ["x[0][0]", "x[1][0]"]


def test_depth_is_bounded() -> None:
    nested: Any = T
    for _ in range(MAX_DEPTH + 10):
        nested = [nested]
    (leaf,) = leaves(nested).values()
    assert isinstance(leaf, Opaque)


def test_long_lists_of_scalars_are_one_leaf() -> None:
    ids = list(range(PACKED_LENGTH))
    assert leaves(ids) == {"x[:]": repr(ids)}
    changed = [*ids[:-1], -1]
    assert leaves(changed) != leaves(ids)
    assert list(leaves([*ids, T]))[-1] == f"x[{PACKED_LENGTH}]"


def test_sets() -> None:
    assert leaves({3, 1, 2}) == leaves({2, 3, 1})
    assert isinstance(leaves([{T}])["x[0]"], Opaque)


@pytest.mark.parametrize("value", [nn.ReLU(), torch.relu, int, object(), Holder(1), lambda: T])
def test_leaves_that_are_not_looked_into(value: object) -> None:
    assert leaves(value) == {"x": value}


class Refusing:
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("keep out")


def test_what_refuses_to_be_looked_into_is_said() -> None:
    found = leaves({"a": Refusing(), "b": T})
    assert found["x.a"] == Opaque("Refusing cannot be looked into (RuntimeError)")
    assert found["x.b"] is T


def test_no_code_of_the_value_runs() -> None:
    value = Hostile()
    assert leaves(value)["x"] is value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner),
    max_leaves=20,
)


@given(JSON)
def test_sites_are_unique_and_lead_to_their_leaves(value: object) -> None:
    for site, leaf in leaves(value).items():
        assert _at(value, site) is leaf or isinstance(leaf, str)


def _at(value: Any, site: str) -> Any:
    """Follow a site through lists and dicts by trying every child."""
    if site == "x":
        return value
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        spelled = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
        rest = site[1:]
        if rest.startswith(spelled) and (rest == spelled or rest[len(spelled)] in ".["):
            return _at(child, "x" + rest[len(spelled) :])
    raise AssertionError(f"{site} leads nowhere")


class Slots:
    __slots__ = ("rows", "unset")

    def __init__(self, rows: object) -> None:
        self.rows = rows


class Attributed(dict[str, Any]):
    """A dict with attributes beside its items."""

    b: object
    c: object


def closing_over(tensor: Tensor) -> object:
    return lambda: tensor


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Slots(T), ["x.rows"]),
        (Slots(3), ["x"]),
        (Holder(Holder(T)), ["x.state.state"]),
        (Holder({"a": [Slots(T)]}), ["x.state.a[0].rows"]),
        (Holder(Holder(Holder(Holder(Holder(T))))), ["x"]),
        (closing_over(T), ["x.tensor", "x.__defaults__", "x.__kwdefaults__"]),
        (functools.partial(torch.add, T, alpha=2), ["x.func", "x.args[0]", "x.keywords.alpha"]),
        (Holder(T).read, ["x.__self__.state", "x.__func__"]),
        (closing_over, ["x"]),
        (functools.partial(torch.add, alpha=2), ["x"]),
    ],
)
def test_objects_that_lead_to_a_tensor_are_looked_into(value: object, expected: list[str]) -> None:
    assert sorted(leaves(value)) == sorted(expected)


def test_attributes_beside_the_items_of_a_dict() -> None:
    value = Attributed(a=T)
    value.b, value.c = Slots(T), 3
    assert sorted(leaves(value)) == ["x.a", "x.b.rows"]
    assert sorted(leaves(ModelOutput(a=T))) == ["x.a"]


def test_a_search_for_tensors_ends_in_a_wide_object() -> None:
    wide = Holder([Holder(number) for number in range(100_000)])
    assert list(leaves(wide)) == ["x"]


def test_keys_that_read_alike_keep_their_values_apart() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    leaves = dict(flatten({float("nan"): one, -float("nan"): other}, "out"))
    assert leaves == {"out[nan]": one, "out[#1]": other}


def test_an_attribute_that_hides_behind_a_key_is_seen() -> None:
    class Output(dict[str, Tensor]):
        pass

    output = Output(logits=torch.zeros(1))
    output.logits = torch.ones(1)  # type: ignore[attr-defined]
    assert [site for site, _ in flatten(output, "out")] == ["out.logits", "out.__dict__.logits"]
    output.logits = output["logits"]  # type: ignore[attr-defined]
    assert [site for site, _ in flatten(output, "out")] == ["out.logits"]
