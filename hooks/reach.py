"""What an object leads to: attributes, containers, closures. Follows references, runs no foreign code."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

_NODE_LIMIT = 200_000
_SCALARS = (str, bytes, bytearray, int, float, complex, type(None), torch.dtype, torch.device)
_CLOSED = (*_SCALARS, type, types.ModuleType, types.BuiltinFunctionType, torch.Tensor)


def reachable(path: str, value: object) -> Iterator[tuple[str, object]]:
    """``value`` and every object it leads to, each once, with the first path that leads to it, depth first.

    Paths read like the sites of a call: ``model.layers.0.rng``, ``inputs[1].mask``, ``kwargs.x``. Classes,
    Python modules and tensors are not entered; host scalars are left out. Ends after 200,000 objects.
    """
    pending: list[tuple[str, object]] = [(path, value)]
    seen: dict[int, object] = {}  # holds what it has seen, so that no id is used twice
    while pending and len(seen) < _NODE_LIMIT:
        path, value = pending.pop()
        if id(value) in seen or isinstance(value, _SCALARS):
            continue
        seen[id(value)] = value
        yield path, value
        if not isinstance(value, _CLOSED):
            # Scalars are dropped here already: a list of a million token ids must not use up the limit.
            children = [(p, child) for p, child in _children(path, value) if not isinstance(child, _SCALARS)]
            pending.extend(children[::-1])


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    match value:
        case torch.nn.Module():
            for key, item in vars(value).items():
                if key in ("_modules", "_parameters", "_buffers"):
                    yield from ((f"{path}.{name}", child) for name, child in item.items())
                else:
                    yield f"{path}.{key}", item
        case dict():
            # Not value.items(): a subclass may import, compute or raise there.
            for key, item in list(dict.items(value)):
                yield f"{path}{step(key)}", item
            yield from _attributes(path, value)
        case list() | tuple() | set() | frozenset():
            fields = getattr(type(value), "_fields", None)
            for i, item in enumerate(_items(value)):
                yield (f"{path}.{fields[i]}" if fields else f"{path}[{i}]"), item
            yield from _attributes(path, value)
        case functools.partial():
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        case types.MethodType():
            yield f"{path}.__self__", value.__self__
            yield f"{path}.__func__", value.__func__
        case types.FunctionType():
            yield f"{path}.__defaults__", value.__defaults__
            yield f"{path}.__kwdefaults__", value.__kwdefaults__
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((f"{path}.{name}", _cell(cell)) for name, cell in cells)
        case _:
            yield from _attributes(path, value)


def _items(value: Any) -> list[object]:
    """The elements that the built-in type under ``value`` holds, whatever a subclass would answer."""
    base = next(base for base in (list, tuple, set, frozenset) if isinstance(value, base))
    return list(base.__iter__(value))


def step(key: object) -> str:
    """What a mapping's key adds to a path."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _attributes(path: str, value: object) -> Iterator[tuple[str, object]]:
    try:
        # Not getattr and not vars: a lazy proxy would answer with whatever it stands for.
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    yield from ((f"{path}.{key}", item) for key, item in list(attributes.items()))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                yield f"{path}.{name}", _slot(member, value)


def _slot(member: types.MemberDescriptorType, value: object) -> object:
    try:
        return member.__get__(value)
    except AttributeError:  # the slot is empty
        return None


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None
