"""Copies of tensors that compute the same: bits, strides, offset, shared storage, conjugate and negative
bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from detaudit.core.digest import NotObservable, parts, unseen


class Storages:
    """Copies of storages, each made once, so that tensors which share one share its copy."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def copy_of(self, storage: torch.UntypedStorage, pinned: bool) -> torch.UntypedStorage:
        if storage._cdata not in self._copies:
            twin = storage.clone()  # type: ignore[no-untyped-call]
            # The original is held too: a storage that died could leave its address to another.
            self._copies[storage._cdata] = (twin.pin_memory() if pinned else twin, storage)
        return self._copies[storage._cdata][0]

    @staticmethod
    def bytes_needed(tensors: Iterable[Tensor]) -> int:
        """Bytes that copies of these take: whole storages, each counted once."""
        sizes: dict[int, int] = {}
        for tensor in tensors:
            if _is_strided(tensor):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
            else:
                sizes[id(tensor)] = _bytes_of_parts(tensor)
        return sum(sizes.values())


def _bytes_of_parts(tensor: Tensor) -> int:
    try:
        return sum(part.numel() * part.element_size() for _, part in parts(tensor))
    except NotObservable:
        return 0


def copy_tensor(tensor: Tensor, storages: Storages) -> Tensor:
    """A detached copy with the same ``requires_grad``, on the same device, of the same class.

    Tensors copied with the same ``storages`` alias one another as the originals do. Sparse, nested and
    quantized tensors are cloned each for itself.

    Raises:
        RuntimeError, NotImplementedError, TypeError, AttributeError: the tensor has no storage, or its class
            cannot be taken apart.
    """
    with torch.inference_mode(tensor.is_inference()):
        return _copy(tensor, storages)


def _copy(tensor: Tensor, storages: Storages) -> Tensor:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _copy(getattr(tensor, name), storages) for name in names}
        rebuild: Any = type(tensor).__tensor_unflatten__
        with _disable_current_modes():
            wrapped: Tensor = rebuild(inner, context, tensor.shape, tensor.stride())
        return wrapped.requires_grad_(tensor.requires_grad)
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{type(tensor).__name__} has no __tensor_flatten__")
    with unseen():
        twin = _copy_strided(tensor, storages) if _is_strided(tensor) else tensor.detach().clone()
    return twin.requires_grad_(tensor.requires_grad)


def _is_strided(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return plain and not is_traceable_wrapper_subclass(tensor)


def _copy_strided(tensor: Tensor, storages: Storages) -> Tensor:
    storage = storages.copy_of(tensor.untyped_storage(), tensor.is_pinned())
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        twin = twin.conj()
    if tensor.is_neg():
        twin = torch._neg_view(twin)
    if type(tensor) is not Tensor:
        twin = twin.as_subclass(type(tensor))
    vars(twin).update(vars(tensor))
    return twin
