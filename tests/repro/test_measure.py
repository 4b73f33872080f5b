"""What a script counts: every kind of difference in bits, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from detaudit.repro.parts.measure import Result, measure

BASE = torch.arange(12, dtype=torch.float32).view(3, 4)


def changed(row: int, column: int, value: float) -> Tensor:
    other = BASE.clone()
    other[row, column] = value
    return other


def result_of(*outputs: Tensor, runs: int = 6, seconds: float = 60.0, enough: int = 0) -> Result:
    """``outputs`` in turn; the first is what the others are compared with."""
    turns = cycle(outputs)

    def run() -> Sequence[Tensor]:
        return (next(turns),)

    return measure(run, runs, seconds, enough=enough)


def test_equal_outputs() -> None:
    result = result_of(BASE)
    assert (result.runs, result.differing, result.distinct) == (6, 0, 1)
    assert result.bound == pytest.approx(1 - 0.05 ** (1 / 6))
    assert (result.rows, result.rows_total) == (0, 3)
    line = result.line("plain")
    assert line == "plain: 0 of 6 runs differ from the first (at most 39.3% of runs do, 95% confidence)"


def test_differences_are_counted_and_measured() -> None:
    step = math.ulp(2.0) * 2.0**29  # of float32
    result = result_of(BASE, changed(0, 2, 2.0 + step), changed(2, 3, 11.5))
    assert (result.runs, result.differing, result.distinct) == (6, 4, 3)
    assert result.max_abs == 0.5
    assert result.rows == 2
    assert result.max_ulp == 2**19  # 0.5 is that many steps of 2**-20 at 11
    assert "largest difference 0.5 (524,288 ULP), 2 of 3 rows" in result.line("x")
    assert result_of(BASE, changed(0, 2, 2.0 + step)).max_ulp == 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64]
)
def test_any_dtype(dtype: torch.dtype) -> None:
    other = BASE.to(dtype).clone()
    other[1, 1] += 1
    result = result_of(BASE.to(dtype), other)
    assert (result.differing, result.rows, result.max_abs) == (3, 1, 1.0)


def test_bits_count_and_not_values() -> None:
    zeros = torch.zeros(2)
    result = result_of(zeros, -zeros)
    assert (result.differing, result.max_abs, result.max_ulp) == (3, 0.0, 0)
    quiet = torch.tensor([0x7FC00000, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    assert result_of(quiet).differing == 0
    assert result_of(quiet, other).differing == 3
    assert result_of(zeros, quiet).max_abs == math.inf


def test_other_shapes_strides_and_empty_tensors() -> None:
    assert result_of(BASE, BASE[:2]).differing == 3
    assert result_of(BASE.t().contiguous().t(), BASE).differing == 0
    empty = result_of(torch.empty(0, 4))
    assert (empty.differing, empty.rows_total) == (0, 0)
    assert result_of(torch.tensor(1.0), torch.tensor(2.0)).rows == 1


def test_when_to_stop() -> None:
    assert result_of(BASE, changed(0, 0, 9.0), runs=100, enough=2).runs == 3
    assert result_of(BASE, runs=100, seconds=0.0).runs == 1
