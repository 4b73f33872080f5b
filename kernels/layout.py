"""Tensors as blocks of bytes and views into them, so that strides, alignment and aliasing survive a copy.

A kernel may choose another code path for a tensor that is not contiguous, or whose address is not a
multiple of 16; two arguments may share memory. ``pack`` cuts the storages behind a set of tensors into
blocks (one for each stretch of bytes that tensors overlap in), ``unpack`` builds the same set again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detaudit.core.errors import Unsupported

ALIGNMENT = 256
"""Addresses are kept modulo this many bytes; no load instruction or TMA descriptor asks for more."""


@dataclass(frozen=True, slots=True)
class Block:
    """``data``: uint8, 1-d. ``alignment``: address of its first byte modulo ``ALIGNMENT``."""

    data: Tensor
    alignment: int


@dataclass(frozen=True, slots=True)
class View:
    """One tensor: ``offset`` in bytes from the start of ``block``, ``strides`` in elements.

    ``block`` is ``None`` for a tensor without elements, which has no bytes to point at.
    """

    block: str | None
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype called ``name``, with or without ``torch.``. Raises ValueError for any other name."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this PyTorch")
    return dtype


def span_bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Bytes from the first element to the end of the last one; 0 if there is none."""
    if 0 in shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (last + 1) * item_bytes


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises Unsupported unless the tensor is strided memory with the bits it shows."""
    subclass = type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if subclass or tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = type(tensor).__name__ if subclass else dtype_name(tensor.layout)  # type: ignore[arg-type]
        raise Unsupported(
            f"argument {name} is a {kind} on {tensor.device}; a case holds plain strided tensors only"
        )


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Block], dict[str, View]]:
    """Blocks by the name of the first tensor in each, and a view for every tensor. Nothing is copied."""
    views: dict[str, View] = {}
    by_storage: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        size = span_bytes(tensor.shape, tensor.stride(), tensor.element_size())
        if size == 0:
            views[name] = _view(tensor, None, 0)
            continue
        start = _start(tensor)
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        by_storage.setdefault(key, []).append((start, start + size, name))

    blocks: dict[str, Block] = {}
    for spans in by_storage.values():
        for start, end, names in _merge(spans):
            data = _bytes(tensors[names[0]], start, end)
            blocks[names[0]] = Block(data, data.data_ptr() % ALIGNMENT)
            for name in names:
                tensor = tensors[name]
                views[name] = _view(tensor, names[0], _start(tensor) - start)
    return blocks, {name: views[name] for name in tensors}


def unpack(blocks: Mapping[str, Block], views: Mapping[str, View], device: torch.device) -> dict[str, Tensor]:
    """New tensors on ``device`` with the bytes, strides, alignment and aliasing that were packed.

    Raises KeyError, RuntimeError or ValueError where the views do not fit the blocks.
    """
    copies = {name: _aligned_copy(block, device) for name, block in blocks.items()}
    return {name: _tensor(view, copies, device) for name, view in views.items()}


def _merge(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, list[str]]]:
    """Joins spans that overlap; spans that merely touch stay apart."""
    merged: list[tuple[int, int, list[str]]] = []
    for start, end, name in sorted(spans):
        if merged and start < merged[-1][1]:
            first, last, names = merged[-1]
            merged[-1] = (first, max(last, end), [*names, name])
        else:
            merged.append((start, end, [name]))
    return merged


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _bytes(tensor: Tensor, start: int, end: int) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def _view(tensor: Tensor, block: str | None, offset: int) -> View:
    return View(block, dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), offset)


def _aligned_copy(block: Block, device: torch.device) -> Tensor:
    size = block.data.numel()
    buffer = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    shift = (block.alignment - buffer.data_ptr()) % ALIGNMENT
    return buffer[shift : shift + size].copy_(block.data)


def _tensor(view: View, copies: Mapping[str, Tensor], device: torch.device) -> Tensor:
    dtype = dtype_of(view.dtype)
    if view.block is None:
        return torch.empty_strided(view.shape, view.strides, dtype=dtype, device=device)
    base = copies[view.block]
    end = view.offset + span_bytes(view.shape, view.strides, dtype.itemsize)
    if view.offset < 0 or end > base.numel() or min(view.strides, default=0) < 0:
        raise ValueError(f"a view reaches beyond block {view.block!r}")
    offset, unaligned = divmod(_start(base) + view.offset, dtype.itemsize)
    if unaligned:
        raise ValueError(f"a {view.dtype} tensor cannot start at byte {view.offset} of block {view.block!r}")
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(base.untyped_storage(), offset, view.shape, view.strides)
