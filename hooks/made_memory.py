"""Memory that operators were seen to make, and what it held before anything was written to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from detaudit.core.digest import is_ordinary, unseen

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PURGE_EVERY = 1024
_UNKNOWN = (None, None)


class MadeMemory:
    """Follows storages by weak references, so that memory is used again as it would be without."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, torch.UntypedStorage | None]] = {}
        self._purge_at = _PURGE_EVERY

    def follow(self, given: Iterable[Tensor], results: Iterable[Tensor], unwritten: bool) -> None:
        """An operator that was given some tensors returned others, whose memory it made.

        Args:
            unwritten: nothing has been written to that memory yet.
        """
        known = {_storage_of(tensor)._cdata for tensor in given if _is_followed(tensor)}
        for tensor in results:
            if _is_followed(tensor) and (storage := _storage_of(tensor))._cdata not in known:
                ref: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[storage._cdata] = ref, _copy(storage) if unwritten else None
        if len(self._made) >= self._purge_at:
            self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
            self._purge_at = 2 * len(self._made) + _PURGE_EVERY

    def made(self, tensor: Tensor) -> bool:
        """Whether an operator that was followed made its memory."""
        return _is_followed(tensor) and _storage_of(tensor)._cdata in self._made

    def written(self, tensor: Tensor) -> Tensor | None:
        """The bits of ``tensor`` with zeros for all elements that are as they were when its memory was made.

        None where that is not known, or its memory was made with contents.
        """
        _, copy = self._made.get(_storage_of(tensor)._cdata, _UNKNOWN) if _is_followed(tensor) else _UNKNOWN
        if copy is None or tensor.element_size() not in _BITS:
            return None
        if copy.nbytes() != _storage_of(tensor).nbytes():  # it has been resized since
            return None
        try:
            with unseen():
                before = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                before.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
                bits = tensor.view(_BITS[tensor.element_size()])
                return bits.masked_fill(bits == before.view(bits.dtype), 0)
        except Exception:  # no memory for it: that is ours, and not the target's to suffer
            return None


def _is_followed(tensor: Tensor) -> bool:
    return is_ordinary(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
    try:
        with unseen():
            return storage.clone()  # type: ignore[no-untyped-call, no-any-return]
    except Exception:
        return None
