"""Replaces an object everywhere it is referred to, so that a function is tapped however it was imported."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Mapping
from typing import Any


def replace_references(pairs: Mapping[int, tuple[object, object]], spare: set[int]) -> None:
    """Put ``new`` wherever ``old`` is held, for all ``pairs`` of ``id(old) -> (old, new)`` in one pass.

    Reached are module globals, attributes of instances and classes (static methods too), dicts, lists,
    closures, default arguments and partials. Not reached are tuples, sets, slots, bound methods, variables of
    running frames and references held in C.

    Args:
        spare: ids of dicts and cells to leave alone.
    """
    for module in list(sys.modules.values()):
        # Named first because a process that called gc.freeze() hides its modules from the walk below.
        if isinstance(module, types.ModuleType):
            _in_dict(object.__getattribute__(module, "__dict__"), pairs, spare)
    held: dict[int, Any] = {}
    for holder in gc.get_referrers(*(old for old, _ in pairs.values())):
        if id(holder) not in spare and not _in_holder(holder, pairs, spare):
            held[id(holder)] = holder
    static = [holder for holder in held.values() if isinstance(holder, staticmethod)]
    if static:
        held |= {id(owner): owner for owner in gc.get_referrers(*static) if type(owner) is dict}
    if held:
        _in_owners(held, pairs)


def _new(value: object, pairs: Mapping[int, tuple[object, object]]) -> object | None:
    pair = pairs.get(id(value))
    return pair[1] if pair is not None and pair[0] is value else None


def _in_dict(mapping: dict[Any, Any], pairs: Mapping[int, tuple[object, object]], spare: set[int]) -> None:
    if id(mapping) in spare:
        return
    for key, value in list(dict.items(mapping)):
        if (new := _new(value, pairs)) is not None:
            dict.__setitem__(mapping, key, new)


def _in_holder(holder: Any, pairs: Mapping[int, tuple[object, object]], spare: set[int]) -> bool:
    """Replace inside one referrer; False where its owner has to be known first."""
    match holder:
        case list():
            for index, value in enumerate(holder):
                if (new := _new(value, pairs)) is not None:
                    holder[index] = new
        case types.CellType():
            if (new := _new(holder.cell_contents, pairs)) is not None:
                holder.cell_contents = new
        case functools.partial():
            _in_partial(holder, pairs)
        case dict() | tuple() | staticmethod():
            return False
        case types.FrameType() | types.FunctionType() | type():
            pass
        case _:
            try:
                # An instance may keep its attributes without a dict until somebody asks for one.
                _in_dict(object.__getattribute__(holder, "__dict__"), pairs, spare)
            except AttributeError:
                pass
    return True


def _in_partial(partial: functools.partial[Any], pairs: Mapping[int, tuple[object, object]]) -> None:
    reduced: Any = partial.__reduce__()
    func, args, keywords, attributes = reduced[2]
    new_args = tuple(_new(arg, pairs) or arg for arg in args)
    new_keywords = {key: _new(value, pairs) or value for key, value in keywords.items()}
    partial.__setstate__((_new(func, pairs) or func, new_args, new_keywords, attributes))  # type: ignore[attr-defined]


def _in_owners(held: dict[int, Any], pairs: Mapping[int, tuple[object, object]]) -> None:
    """What belongs to a class or is a function's defaults is written through its owner, other dicts as
    such."""
    owned: set[int] = set()
    for owner in gc.get_referrers(*held.values()):
        if isinstance(owner, type):
            owned.update(id(part) for part in gc.get_referents(owner) if type(part) is dict)
            _in_class(owner, pairs)
        elif isinstance(owner, functools.partial):
            _in_partial(owner, pairs)
        elif isinstance(owner, types.FunctionType) and owner.__defaults__ and id(owner.__defaults__) in held:
            owner.__defaults__ = tuple(_new(value, pairs) or value for value in owner.__defaults__)
    for identity, mapping in held.items():
        if isinstance(mapping, dict) and identity not in owned:
            _in_dict(mapping, pairs, set())


def _in_class(cls: type, pairs: Mapping[int, tuple[object, object]]) -> None:
    for key, value in list(vars(cls).items()):
        static = isinstance(value, staticmethod)
        if (new := _new(value.__func__ if static else value, pairs)) is not None:
            setattr(cls, key, staticmethod(new) if static else new)  # type: ignore[arg-type]
