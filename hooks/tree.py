"""The leaves of a value handed to or returned by a module, each with its site.

Looked into are dicts, lists, tuples, named tuples, deques, dataclasses, Hugging Face ModelOutputs (dicts)
and cache objects: plain Python objects that hold tensors, or whose class is called a cache. Nothing of the
value's own code runs: attributes are read from ``__dict__``, dicts through ``dict`` itself.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 64
PACKED_LENGTH = 64
"""A list of at least this many bare scalars (token ids, say) is one leaf instead of one for each."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_KEYS = (str, int, float, bool, bytes, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A leaf that cannot be looked into, and why."""

    reason: str


_CLOSED = (Tensor, nn.Module, type, torch.Generator, Opaque)


def flatten(value: object, site: str) -> Iterator[tuple[str, object]]:
    """(site, leaf) of everything in ``value``, in the order it is kept there.

    Leaves are tensors, host scalars, generators, ``Opaque`` markers and whatever else is not a container. An
    object inside itself ends there. Sites: ``site[0]``, ``site.key`` for string keys that are identifiers,
    ``site['other key']``, ``site.field``. Keys without a stable spelling are told apart by their position.
    """
    leaves: list[tuple[str, object]] = []
    _walk(value, site, leaves, {})
    return iter(leaves)


def _walk(value: object, site: str, leaves: list[tuple[str, object]], open_: dict[int, object]) -> None:
    kind = type(value)
    if kind is Tensor or kind in _ATOMS:
        leaves.append((site, value))
        return
    try:
        children = (_BY_TYPE.get(kind) or _children)(value)
    except Exception as error:  # attributes and dicts of user classes may refuse in any way they like
        value, children = Opaque(f"{kind.__name__} cannot be looked into ({type(error).__name__})"), None
    if children is None:
        leaves.append((site, value))
    elif len(open_) >= MAX_DEPTH:
        leaves.append((site, Opaque(f"nested deeper than {MAX_DEPTH} levels")))
    elif id(value) not in open_:
        open_[id(value)] = value
        for suffix, child in children:
            _walk(child, site + suffix, leaves, open_)
        del open_[id(value)]


def _children(value: object) -> Iterable[tuple[str, object]] | None:
    """(site suffix, child) pairs of a container, or None for a leaf."""
    for base, children in _CONTAINERS:
        if isinstance(value, base):
            return children(value)
    if isinstance(value, _CLOSED) or (callable(value) and not _is_cache(value)):
        return None
    if dataclasses.is_dataclass(value) or _is_cache(value):
        return _attributes(value)
    return None


def _entries(mapping: Mapping[object, object]) -> list[tuple[str, object]]:
    items = dict.items(mapping) if isinstance(mapping, dict) else mapping.items()
    return [(_key(key, i), item) for i, (key, item) in enumerate(items)]


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
    held = vars(value) if hasattr(value, "__dict__") else {}
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    slots = {name: getattr(value, name) for name in names if name not in held and hasattr(value, name)}
    return [(f".{name}", item) for name, item in {**slots, **held}.items()]


def _is_cache(value: object) -> bool:
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return False
    named = any("Cache" in cls.__name__ for cls in type(value).__mro__)
    return named or any(_holds_tensor(item) for item in held.values())


def _holds_tensor(item: object) -> bool:
    if isinstance(item, dict):
        item = list(item.values())
    return isinstance(item, Tensor) or (
        isinstance(item, (list, tuple)) and any(isinstance(part, Tensor) for part in item)
    )


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
