"""A module's own state: its buffers, and the tensors and scalars its attributes lead to; no parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.hooks.names import inner_of, join, named_modules
from detaudit.hooks.tree import flatten

_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {
    "_compiled_call_impl",
    "_former_parameters",
    "_is_replica",
    "_c",
    "_concrete_type",
    "_initializing",
    "dynamo_ctx",
    "get_compiler_config",
    "_super_module_initialized",
    "_torchdynamo_orig_callable",
    "_torchdynamo_wrapper_id",
}
_LOOK_AHEAD = 2
"""An attribute may be a whole engine or optimizer; what lies deeper in it is hardly the module's own."""
_FIXED = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_SIMPLE = frozenset({Tensor, torch.Generator, bool, int, float, complex, str, bytes, type(None)})


@dataclass(frozen=True, slots=True)
class OwnState:
    """Leaves of a module's own state: those digested at every call, and those too large for that."""

    leaves: list[tuple[str, object]]
    large: list[tuple[str, Tensor]]


def is_closed(module: nn.Module) -> bool:
    """Whether what happens inside is not seen, so that the state of all modules inside counts as its own."""
    held, cls = module.__dict__, type(module)
    return (
        held.get("_compiled_call_impl") is not None
        or cls.__name__ == "OptimizedModule"
        or ("forward" in held and _is_compiled(held["forward"]))
        or _is_compiled(getattr(cls, "forward", None))
        or isinstance(module, torch.jit.ScriptModule)
    )


def _is_compiled(function: object) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(
        function, "_torchdynamo_disable", False
    )


@dataclass(frozen=True, slots=True)
class Constant:
    """What tells that a module's own state is still the same: it consists of immutable attributes only.

    Objects that could hold the module are not kept, so that it is not kept alive.
    """

    attributes: list[str]
    values: tuple[object, ...]
    read: Callable[[dict[str, object]], tuple[object, ...]]

    @classmethod
    def of(cls, module: nn.Module) -> Constant | None:
        """None for a module that has buffers, other tensors, or anything that could change in place."""
        held = module.__dict__
        own = [name for name in held if name not in _INTERNAL]
        if (
            held.get("_buffers")
            or inner_of(module) is not None
            or not all(map(_is_fixed, map(held.get, own)))
        ):
            return None
        if not isinstance(held.get("_buffers"), dict) or "training" not in held:
            return None
        read = operator.itemgetter("training", "training", *own)  # two at least, so that it gives a tuple
        return cls(list(held), read(held), read)

    def holds(self, module: nn.Module) -> bool:
        """Whether the own state of ``module`` is what it was."""
        held = module.__dict__
        return (
            list(held) == self.attributes
            and not held["_buffers"]
            and all(map(operator.is_, self.read(held), self.values))
        )


def _is_fixed(value: object) -> bool:
    kind = type(value)
    return kind in _FIXED or (kind is tuple and all(type(item) in _FIXED for item in value))  # type: ignore[attr-defined]


def own_state(module: nn.Module, large_bytes: int, closed: bool = False) -> OwnState:
    """The own state of ``module``, of which at most ``large_bytes`` are to be digested at every call.

    Sites are ``buffer.NAME`` and ``attr.NAME``. Where the tensors hold more than ``large_bytes`` together,
    the largest ones are set apart until the rest fits. ``closed``: with the state of all modules inside.
    """
    leaves: list[tuple[str, object]] = []
    for path, member in named_modules(module) if closed else (("", module),):
        _add_buffers(member, path, leaves)
        if inner_of(member) is None:  # a wrapper's attributes are about wrapping
            _add_attributes(member, path, leaves)
    return _split(leaves, large_bytes)


def _add_buffers(module: nn.Module, path: str, leaves: list[tuple[str, object]]) -> None:
    buffers: Any = module.__dict__.get("_buffers")
    if not isinstance(buffers, dict):
        buffers = dict(module.named_buffers(recurse=False))
    for name, buffer in buffers.items():
        if buffer is not None:
            leaves.append(("buffer." + join(path, name), buffer))


def _add_attributes(module: nn.Module, path: str, leaves: list[tuple[str, object]]) -> None:
    prefix = f"attr.{path}." if path else "attr."
    for name, value in list(module.__dict__.items()):
        if name in _INTERNAL:
            continue
        if type(value) in _SIMPLE:
            leaves.append((prefix + name, value))
        else:
            found = flatten(value, prefix + name, look_ahead=_LOOK_AHEAD)
            leaves.extend(entry for entry in found if not isinstance(entry[1], (nn.Module, nn.Parameter)))


def _split(leaves: list[tuple[str, object]], large_bytes: int) -> OwnState:
    tensors = [(site, leaf) for site, leaf in leaves if isinstance(leaf, Tensor)]
    excess = sum(_bytes(tensor) for _, tensor in tensors) - large_bytes
    large: list[tuple[str, Tensor]] = []
    if excess > 0:
        for site, tensor in sorted(tensors, key=lambda entry: _bytes(entry[1]), reverse=True):
            if excess <= 0:
                break
            large.append((site, tensor))
            excess -= _bytes(tensor)
        apart = {site for site, _ in large}
        leaves = [(site, leaf) for site, leaf in leaves if site not in apart]
    return OwnState(leaves, large)


def _bytes(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except (RuntimeError, NotImplementedError):  # nested and opaque tensors have no single size
        return 0
