"""Runs a call again and again and counts what differs from its first output, bit by bit."""

from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Result:
    """``runs`` compared with the first; ``rows`` of ``rows_total`` differed in any of them."""

    runs: int = 0
    differing: int = 0
    distinct: int = 1
    max_abs: float = 0.0
    max_ulp: int = 0
    rows: int = 0
    rows_total: int = 0
    median_ms: float = 0.0
    bound: float = field(default=1.0)

    def line(self, name: str) -> str:
        """One line for people."""
        text = f"{name}: {self.differing} of {self.runs} runs differ from the first"
        if not self.differing:
            return f"{text} (at most {100 * self.bound:.1f}% of runs do, 95% confidence)"
        size = f"largest difference {self.max_abs:.3g}" + (f" ({self.max_ulp:,} ULP)" if self.max_ulp else "")
        return f"{text}, {self.distinct} distinct outputs, {size}, {self.rows:,} of {self.rows_total:,} rows"


def measure(run: Run, runs: int, seconds: float, *, enough: int = 0) -> Result:
    """Compare ``runs`` runs with one more that is made first.

    Args:
        seconds: no new run is begun after this time, once one has been compared.
        enough: stop after this many that differ; 0 for never.
    """
    first = [tensor.clone() for tensor in run()]
    seen, touched = {_digest(first)}, [_rows(tensor, tensor) for tensor in first]
    result = Result(rows_total=sum(rows.numel() for rows in touched))
    times: list[float] = []
    end = time.monotonic() + seconds
    while result.runs < runs and (not result.runs or time.monotonic() < end):
        _synchronize(first)
        begun = time.perf_counter()
        output = run()
        _synchronize(first)
        times.append(1e3 * (time.perf_counter() - begun))
        result.runs += 1
        if _compare(first, output, touched, result):
            result.differing += 1
            seen.add(_digest(output))
        if enough and result.differing >= enough:
            break
    result.distinct = len(seen)
    result.rows = sum(int(rows.sum()) for rows in touched)
    result.median_ms = sorted(times)[len(times) // 2]
    result.bound = 1.0 - 0.05 ** (1.0 / result.runs)
    return result


def _compare(
    first: Sequence[Tensor], output: Sequence[Tensor], touched: list[Tensor], result: Result
) -> bool:
    differs = False
    for index, (a, b) in enumerate(zip(first, output, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            result.max_abs = math.inf
            differs = True
        elif not torch.equal(_bits(a), _bits(b)):
            touched[index] |= _rows(a, b)
            result.max_abs = max(result.max_abs, _distance(a, b))
            result.max_ulp = max(result.max_ulp, _ulps(a, b))
            differs = True
    return differs


def _bits(tensor: Tensor) -> Tensor:
    """As integers: a NaN equals itself then, and -0.0 is not 0.0."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_WORDS[real.element_size()])


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """For each row (last dimension), whether it holds a differing bit."""
    different = _bits(a) != _bits(b)
    return different.reshape(-1, a.shape[-1] if a.dim() else 1).any(1) if a.numel() else different.flatten()


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where a NaN meets a number."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    gap = (a.double() - b.double()).abs()[_bits(a) != _bits(b)]
    return math.inf if bool(gap.isnan().any()) else float(gap.max())


def _ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance in units in the last place; 0 for what is not a float of 2 or 4 bytes."""
    if not a.is_floating_point() or a.element_size() not in (2, 4):
        return 0
    top = (1 << (8 * a.element_size() - 1)) - 1
    ordered = []
    for tensor in (a, b):
        words = _bits(tensor).long()
        ordered.append(torch.where(words < 0, -(words & top), words))
    return int((ordered[0] - ordered[1]).abs().max())


def _digest(tensors: Sequence[Tensor]) -> bytes:
    found = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()  # held, while its memory is read
        found.update(ctypes.string_at(data.data_ptr(), data.nbytes) if data.nbytes else b"")
    return found.digest()


def _synchronize(tensors: Sequence[Tensor]) -> None:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
