"""The leaves of a value handed to or returned by a module, each with its site.

Looked into are dicts, lists, tuples, named tuples, deques, dataclasses, Hugging Face ModelOutputs (dicts)
and cache objects: plain Python objects that lead to tensors, or whose class is called a cache. A function, a
partial or a bound method is such an object where what it closes over leads to a tensor. Nothing of the
value's own code runs: attributes are read from ``__dict__`` and slots, dicts through ``dict`` itself.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 64
LOOK_AHEAD = 4
"""A tensor is looked for this many steps away from an object, and among as many things as ``LOOK_WIDTH``."""
LOOK_WIDTH = 256
PACKED_LENGTH = 64
"""A list of at least this many bare scalars (token ids, say) is one leaf instead of one for each."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_KEYS = (str, int, float, bool, bytes, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A leaf that cannot be looked into, and why."""

    reason: str


_CLOSED = (Tensor, nn.Module, type, types.ModuleType, torch.Generator, Opaque)


def flatten(value: object, site: str, look_ahead: int = LOOK_AHEAD) -> Iterator[tuple[str, object]]:
    """(site, leaf) of everything in ``value``, in the order it is kept there.

    Leaves are tensors, host scalars, generators, ``Opaque`` markers and whatever else is not a container. An
    object inside itself ends there. Sites: ``site[0]``, ``site.key`` for string keys that are identifiers,
    ``site['other key']``, ``site.field``. Keys without a stable spelling are told apart by their position.
    Whether a plain object holds tensors is looked for ``look_ahead`` steps away from it.
    """
    leaves: list[tuple[str, object]] = []
    _walk(value, site, leaves, {}, look_ahead)
    return iter(leaves)


def _walk(
    value: object, site: str, leaves: list[tuple[str, object]], open_: dict[int, object], look_ahead: int
) -> None:
    kind = type(value)
    if kind is Tensor or kind in _ATOMS:
        leaves.append((site, value))
        return
    try:
        by_type = _BY_TYPE.get(kind)
        children = by_type(value) if by_type else _children(value, look_ahead)
    except Exception as error:  # attributes and dicts of user classes may refuse in any way they like
        value, children = Opaque(f"{kind.__name__} cannot be looked into ({type(error).__name__})"), None
    if children is None:
        leaves.append((site, value))
    elif len(open_) >= MAX_DEPTH:
        leaves.append((site, Opaque(f"nested deeper than {MAX_DEPTH} levels")))
    elif id(value) not in open_:
        open_[id(value)] = value
        for suffix, child in children:
            _walk(child, site + suffix, leaves, open_, look_ahead)
        del open_[id(value)]


def _children(value: object, look_ahead: int) -> Iterable[tuple[str, object]] | None:
    """(site suffix, child) pairs of a container, or None for a leaf."""
    for base, children in _CONTAINERS:
        if isinstance(value, base):
            found = children(value)
            return found + _beside(value, dict(found), look_ahead) if hasattr(value, "__dict__") else found
    if isinstance(value, _CLOSED):
        return None
    if dataclasses.is_dataclass(value) and not callable(value):
        return _attributes(value)
    return _attributes(value) if _is_cache(value, look_ahead) else None


def _beside(value: object, found: Mapping[str, object], look_ahead: int) -> list[tuple[str, object]]:
    """Attributes with tensors that a subclass of a container has beside its elements."""
    own = "data" if isinstance(value, UserDict) else None
    beside: list[tuple[str, object]] = []
    for name, item in _dict_of(value).items():
        site = f".{name}"
        if name == own or found.get(site) is item or not _leads_to_tensor(item, look_ahead):
            continue
        beside.append((f".__dict__{site}" if site in found else site, item))
    return beside


def _entries(mapping: Mapping[object, object]) -> list[tuple[str, object]]:
    items = dict.items(mapping) if isinstance(mapping, dict) else mapping.items()
    entries = {}
    for position, (key, item) in enumerate(items):
        site = _key(key, position)
        entries[f"[#{position}]" if site in entries else site] = item  # two NaNs, for one
    return list(entries.items())


def _key(key: object, position: int) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    if isinstance(key, _KEYS) or (isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)):
        return f"[{key!r}]"
    return f"[#{position}]"


def _items(sequence: Iterable[object]) -> list[tuple[str, object]]:
    items = list(sequence)
    if len(items) >= PACKED_LENGTH and all(type(item) in _ATOMS for item in items):
        return [("[:]", repr(items))]
    return [(f"[{i}]", item) for i, item in enumerate(items)]


def _tuple(value: tuple[object, ...]) -> list[tuple[str, object]]:
    fields = getattr(type(value), "_fields", None)
    if fields is None:
        return _items(value)
    return [(f".{name}", item) for name, item in zip(fields, value, strict=True)]


def _set(value: set[object] | frozenset[object]) -> list[tuple[str, object]]:
    if all(type(item) in _ATOMS for item in value):
        return [("[:]", repr(sorted(map(repr, value))))]
    return [("", Opaque("a set has no order in which its objects could be told apart"))]


def _attributes(value: object) -> list[tuple[str, object]]:
    """What an object holds: attributes and slots; what a function closes over, what a partial binds."""
    match value:
        case types.FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            defaults = [("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
            held = [*((name, _cell(cell)) for name, cell in cells), *defaults]
        case functools.partial():
            held = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        case types.MethodType():
            held = [("__self__", value.__self__), ("__func__", value.__func__)]
        case _:
            held = [*_slots(value).items(), *_dict_of(value).items()]
    return [(f".{name}", item) for name, item in held]


def _dict_of(value: object) -> dict[str, object]:
    held = getattr(value, "__dict__", None)
    return held if type(held) is dict else {}


def _slots(value: object) -> dict[str, object]:
    slots = [
        (name, member)
        for cls in reversed(type(value).__mro__)
        for name, member in vars(cls).items()
        if isinstance(member, types.MemberDescriptorType) and "__slots__" in vars(cls)
    ]
    return {name: member.__get__(value) for name, member in slots if hasattr(value, name)}


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


def _is_cache(value: object, look_ahead: int) -> bool:
    if hasattr(value, "__dict__") and any("Cache" in cls.__name__ for cls in type(value).__mro__):
        return True
    return _leads_to_tensor(value, look_ahead + 1)


def _leads_to_tensor(value: object, steps: int, left: Iterator[int] | None = None) -> bool:
    """Whether a tensor is found fewer than so many steps away, among as many objects as ``left`` counts."""
    if isinstance(value, Tensor):
        return True
    left = iter(range(LOOK_WIDTH)) if left is None else left
    if steps < 2 or type(value) in _ATOMS or isinstance(value, _CLOSED) or next(left, None) is None:
        return False
    if isinstance(value, dict):
        held: Iterable[object] = list(dict.values(value))
    elif isinstance(value, (list, tuple, deque)):
        held = value
    else:
        held = (item for _, item in _attributes(value))
    return any(_leads_to_tensor(item, steps - 1, left) for item in held)


_CONTAINERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], list[tuple[str, object]]]], ...] = (
    ((dict, UserDict, type(type.__dict__)), _entries),
    (tuple, _tuple),
    ((list, deque), _items),
    ((set, frozenset), _set),
)
_BY_TYPE: dict[type, Callable[[Any], list[tuple[str, object]]]] = {
    dict: _entries,
    tuple: _items,
    list: _items,
}
