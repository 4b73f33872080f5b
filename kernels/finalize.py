"""Finalize: the weighted sum of each token's top-k expert outputs, in the order of k or in no fixed order.

`finalize_atomic` is what a fused GEMM epilogue does: contributions are added to the output as they come, and
the order of the additions, and with it the rounding, is left to chance. With one or two terms there is
nothing to reorder: zero plus two terms rounds once, at the same value.

Both take the experts' outputs as ``rows`` [T * k, H], grouped by expert, where row r belongs to (token, slot)
``order[r]`` of the flattened [T, k], and ``scales`` [T, k]; both overwrite ``out`` [T, H], whatever it held.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import torch
from torch import Tensor

from detaudit.core.errors import UsageError

Finalize = Literal["atomic", "ordered"]
Accumulate = Literal["fp32", "bf16"]

_THREADS = 4
_TILE_ELEMENTS = 16384
"""Of one locked addition; from 32,768 on torch would split it among threads of its own."""


def check_modes(finalize: str, accumulate: str) -> None:
    """Raise UsageError for a mode that does not exist."""
    for name, value, known in (
        ("finalize", finalize, get_args(Finalize)),
        ("accumulate", accumulate, get_args(Accumulate)),
    ):
        if value not in known:
            raise UsageError(f"{name} is {value!r}; choose one of {', '.join(known)}")


def finalize_ordered(rows: Tensor, order: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Sum in the order of k, in the dtype of ``rows`` (float32, float64); round to that of ``out`` once."""
    position = _positions(order, scales)
    total = rows.new_zeros(out.shape)
    for slot in range(scales.shape[1]):
        total += rows[position[:, slot]] * scales[:, slot : slot + 1]
    return out.copy_(total)


def finalize_atomic(
    rows: Tensor, order: Tensor, scales: Tensor, out: Tensor, accumulate: Accumulate
) -> Tensor:
    """Sum in an order that differs from run to run.

    ``fp32`` keeps the sum in float32 and rounds it once to the dtype of ``out``. ``bf16`` rounds each
    contribution to bfloat16 and adds it to a bfloat16 sum, which rounds again, as the fused kernel does
    (``REDG.ADD.BF16``).

    On CUDA the additions are hardware atomics. On a CPU the fp32 sum is torch's own scatter, whose threads
    race where at least two of them share at least 32,768 elements. Torch's bfloat16 scatter is sequential,
    so there the threads are ours, and a lock makes each addition whole without deciding whose comes first.
    """
    if accumulate == "fp32":
        total = _scatter(rows, order, scales, torch.float32)
    elif rows.is_cuda:
        total = _scatter(rows, order, scales, torch.bfloat16)
    else:
        total = _race(rows, _positions(order, scales), scales)
    return out.copy_(total)


def _scatter(rows: Tensor, order: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, top_k = scales.shape
    contributions = (rows * scales.flatten()[order].unsqueeze(-1)).to(dtype)
    total = contributions.new_zeros(tokens, rows.shape[1])
    token = order // top_k
    if rows.is_cuda:
        # On CUDA index_put_ sorts its indices and adds in a fixed order; index_add_ uses atomics.
        return total.index_add_(0, token, contributions)
    return total.index_put_((token,), contributions, accumulate=True)


def _race(rows: Tensor, position: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 sum on a CPU: threads sweep over the tokens, each with another of the k slots."""
    tokens, top_k = scales.shape
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.bfloat16, device=rows.device)
    tile = max(1, _TILE_ELEMENTS // rows.shape[1])
    lock = threading.Lock()

    def add(slot: int) -> None:
        for start in range(0, tokens, tile):
            part = slice(start, start + tile)
            contribution = (rows[position[part, slot]] * scales[part, slot : slot + 1]).bfloat16()
            with lock:
                total[part] += contribution

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(add, range(top_k)))
    return total


def _positions(order: Tensor, scales: Tensor) -> Tensor:
    """[T, k]: the row in which each (token, slot) lies."""
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device=order.device)
    return position.view(scales.shape)
