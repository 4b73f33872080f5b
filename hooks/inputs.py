"""Copies of a run's inputs, so that what a run does to them reaches no other run and can be told.

A copy has the original's shape, strides, storage offset, dtype, conjugate and negative bits,
``requires_grad`` and pinning; tensors that share a storage go on sharing one. Parameters, modules and
generators are handed on as they are: they belong to the model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from detaudit.core.digest import NotObservable, as_words, parts, unseen
from detaudit.hooks.reach import reachable, step

_SHARED = (nn.Parameter, nn.Module, torch.Generator)


class InputCopies:
    """One run's inputs: ``value`` is what the run gets, the originals stay behind for comparison.

    Args:
        inputs: what ``make_inputs`` returned: a tensor, or containers and objects that lead to tensors.
        site: what the paths in ``mutated`` begin with.

    ``notes`` holds (path, reason) of what could not be copied faithfully.
    """

    def __init__(self, inputs: object, site: str = "inputs") -> None:
        self.notes: list[tuple[str, str]] = []
        self._pairs: list[tuple[str, Tensor, Tensor]] = []
        storages: dict[int, torch.UntypedStorage] = {}
        memo: dict[int, Any] = {}
        for path, value in reachable(site, inputs):
            if isinstance(value, _SHARED):
                memo[id(value)] = value
            elif isinstance(value, Tensor):
                memo[id(value)] = self._copy(path, value, storages)
        self.value: Any = self._rebuild(site, inputs, memo)

    def mutated(self) -> tuple[str, ...]:
        """Paths of the input tensors that the run changed in place: bits, shape, strides or dtype.

        Compares on the tensors' own device and so synchronises; call it after the run.
        """
        return tuple(path for path, original, given in self._pairs if not _same(original, given))

    def _copy(self, path: str, tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        if tensor.grad_fn is not None:
            self.notes.append((path, "it has a gradient history, which the copy has not"))
        try:
            with torch.inference_mode(tensor.is_inference()):
                twin = _copy_any(tensor, storages)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            self.notes.append((path, f"not copied ({type(error).__name__}: {error})".splitlines()[0]))
            return tensor
        self._pairs.append((path, tensor, twin))
        return twin

    def _rebuild(self, path: str, value: object, memo: dict[int, Any]) -> object:
        """``value`` with the tensors of ``memo`` in place of its own; objects that refuse are shared."""
        try:
            return copy.deepcopy(value, dict(memo))
        except Exception as error:  # user classes: locks, handles, their own __deepcopy__
            reason = f"{type(value).__name__} not copied ({type(error).__name__}: {error})".splitlines()[0]
        match value:
            case dict() if type(value) is dict:
                return {key: self._rebuild(path + step(key), item, memo) for key, item in value.items()}
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)(self._rebuild(f"{path}[{i}]", item, memo) for i, item in enumerate(value))
        self.notes.append((path, reason))
        return value


def _copy_any(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _copy_any(getattr(tensor, name), storages) for name in names}
        rebuild: Any = type(tensor).__tensor_unflatten__
        with _disable_current_modes():
            wrapped: Tensor = rebuild(inner, context, tensor.shape, tensor.stride())
        return wrapped.requires_grad_(tensor.requires_grad)
    with unseen():
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            twin = tensor.detach().clone()
        else:
            twin = _copy_strided(tensor, storages)
    return twin.requires_grad_(tensor.requires_grad)


def _copy_strided(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        twin_storage = storage.clone()  # type: ignore[no-untyped-call]
        storages[storage._cdata] = twin_storage.pin_memory() if tensor.is_pinned() else twin_storage
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        twin = twin.conj()
    if tensor.is_neg():
        twin = torch._neg_view(twin)
    if type(tensor) is not Tensor:
        twin = twin.as_subclass(type(tensor))
    vars(twin).update(vars(tensor))
    return twin


def _same(original: Tensor, given: Tensor) -> bool:
    if original is given:
        return True
    try:
        ours, theirs = parts(original), parts(given)
    except NotObservable:
        return True
    return len(ours) == len(theirs) and all(
        name == other and _same_bits(a, b) for (name, a), (other, b) in zip(ours, theirs, strict=True)
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.device, a.shape, a.stride()) != (b.dtype, b.device, b.shape, b.stride()):
        return False
    with unseen():
        return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    # As integers: a NaN equals itself then, and -0.0 is not 0.0.
    return as_words(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
