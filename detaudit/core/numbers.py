"""How far apart two tensors of the same dtype and shape are: ULPs, absolute difference, rows.

ULP distance is the number of steps between representable values: bit patterns are mapped to integers ordered
as the values are (a sign-magnitude pattern becomes its signed magnitude, so that -0.0 and 0.0 meet at 0) and
subtracted. For integers and bool it is the plain difference. A complex element counts as two real ones, a
byte of packed fp4 as two as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from detaudit.core.digest import as_words, dtype_name, unseen

CHUNK_ELEMENTS = 1 << 20
"""Elements compared at a time, on the host: about 64 MiB of working memory."""
ROWS_LISTED = 4096

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
if hasattr(torch, "bcomplex32"):  # since torch 2.14
    _REAL[torch.bcomplex32] = torch.bfloat16
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of fp4 E2M1 by its three low bits (OCP Microscaling Formats 1.0, 5.3.3)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors differ.

    Args:
        max_ulp: largest ULP distance; 0 if nothing differs in value. A NaN on one side only is left out.
        max_abs: largest absolute difference in fp64; infinite where a NaN or an infinity is on one side only.
        value_equal: all pairs are equal as values: -0.0 equals 0.0, and a NaN any other NaN.
        ulp_histogram: how many elements with differing bits have which ULP distance, keyed by the largest
            power of two not above it (``"1"``; ``"2"`` for 2 and 3; ``"4"`` for 4 to 7; ...); ``"0"``
            counts other bits of an equal value, ``"nan"`` a NaN on one side only.
        rows: rows (all dimensions but the last, flattened) with differing bits, ascending, at most 4,096.
        rows_differing, rows_total, elements_differing: counts, by bits.
        has_nan: a NaN occurs on either side.
    """

    max_ulp: int
    max_abs: float
    value_equal: bool
    ulp_histogram: Mapping[str, int]
    rows: tuple[int, ...]
    rows_differing: int
    rows_total: int
    elements_differing: int
    has_nan: bool


def difference(a: Tensor, b: Tensor) -> Difference:
    """Compare two plain strided tensors of one dtype and shape, on any devices.

    Raises:
        ValueError: their dtypes or shapes differ.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"cannot compare {a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)}")
    with unseen():
        rows = math.prod(a.shape[:-1])
        tally = _Tally(a.dtype, columns=a.shape[-1] if a.dim() else 1)
        for piece_a, piece_b in _pieces(a.detach(), b.detach()):
            tally.add(piece_a, piece_b)
        return tally.result(rows if a.numel() else 0)


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut both alike, in row-major order, into views of at most CHUNK_ELEMENTS elements."""
    if a.numel() <= CHUNK_ELEMENTS:
        yield a, b
        return
    step = CHUNK_ELEMENTS * a.shape[0] // a.numel()
    if step == 0:
        for row_a, row_b in zip(a, b, strict=True):
            yield from _pieces(row_a, row_b)
        return
    for start in range(0, a.shape[0], step):
        yield a[start : start + step], b[start : start + step]


class _Tally:
    """Adds up the comparison of consecutive pieces."""

    def __init__(self, dtype: torch.dtype, columns: int) -> None:
        self.format = _Format(dtype)
        self.columns = columns * self.format.per_element
        self.position = 0
        self.rows: list[int] = []
        self.last_row = -1
        self.rows_differing = 0
        self.elements_differing = 0
        self.max_ulp = 0
        self.max_abs = 0.0
        self.has_nan = False
        self.histogram: Counter[str] = Counter()

    def add(self, a: Tensor, b: Tensor) -> None:
        words_a, words_b = self.format.words(a), self.format.words(b)
        self.has_nan = self.has_nan or self.format.any_nan(words_a) or self.format.any_nan(words_b)
        where = (words_a != words_b).nonzero().flatten()
        if len(where):
            self._add_rows(where)
            self._add_numbers(words_a[where], words_b[where])
        self.position += len(words_a)

    def _add_rows(self, where: Tensor) -> None:
        rows = torch.unique_consecutive((where + self.position) // self.columns)
        if int(rows[0]) == self.last_row:
            rows = rows[1:]
        self.rows += rows[: ROWS_LISTED - len(self.rows)].tolist()
        self.rows_differing += len(rows)
        self.last_row = int(rows[-1]) if len(rows) else self.last_row
        self.elements_differing += len(where)

    def _add_numbers(self, words_a: Tensor, words_b: Tensor) -> None:
        if not self.format.is_float:
            self._add_distances(self.format.ordered(words_a), self.format.ordered(words_b))
            self.max_abs = float(self.max_ulp)
            return
        values_a, values_b = self.format.values(words_a), self.format.values(words_b)
        nan_a, nan_b = values_a.isnan(), values_b.isnan()
        self._count("nan", int((nan_a ^ nan_b).sum()))
        self._count("0", int((nan_a & nan_b).sum()))
        if (nan_a ^ nan_b).any():
            self.max_abs = math.inf
        both = ~(nan_a | nan_b)
        if both.any():
            gap = (values_a[both] - values_b[both]).abs()
            self.max_abs = max(self.max_abs, float(gap.max()))
            self._add_distances(self.format.ordered(words_a[both]), self.format.ordered(words_b[both]))

    def _add_distances(self, a: Tensor, b: Tensor) -> None:
        # Distances of 64-bit patterns reach 2**64 - 1: int64 wraps, and what reads as negative is 2**64 less.
        distance = torch.maximum(a, b) - torch.minimum(a, b)
        wrapped = distance < 0
        top = int(distance[wrapped].max()) + (1 << 64) if wrapped.any() else int(distance.max())
        self.max_ulp = max(self.max_ulp, top)
        self._count(str(1 << 63), int(wrapped.sum()))
        self._count("0", int((distance == 0).sum()))
        for power in range(min(top.bit_length(), 63)):
            inside = (distance >> power) == 1
            self._count(str(1 << power), int(inside.sum()))

    def _count(self, key: str, elements: int) -> None:
        if elements:
            self.histogram[key] += elements

    def result(self, rows_total: int) -> Difference:
        keys = sorted(self.histogram, key=lambda key: math.inf if key == "nan" else int(key))
        return Difference(
            max_ulp=self.max_ulp,
            max_abs=self.max_abs,
            value_equal=set(keys) <= {"0"},
            ulp_histogram={key: self.histogram[key] for key in keys},
            rows=tuple(self.rows),
            rows_differing=self.rows_differing,
            rows_total=rows_total,
            elements_differing=self.elements_differing,
            has_nan=self.has_nan,
        )


class _Format:
    """How a dtype's bit patterns are read: as words, as values in fp64, as ordered integers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.real = _REAL.get(dtype, dtype)
        self.packed_fp4 = dtype_name(dtype) == "float4_e2m1fn_x2"
        self.per_element = 2 if self.packed_fp4 or dtype in _REAL else 1
        self.bits = 4 if self.packed_fp4 else 8 * self.real.itemsize
        self.is_float = self.real.is_floating_point
        name = dtype_name(self.real)
        self.is_signed = name.startswith("int") or (self.is_float and name != "float8_e8m0fnu")

    def words(self, piece: Tensor) -> Tensor:
        """Bit patterns of the real elements: a flat signed integer tensor on the host."""
        flat = as_words(piece).to(device="cpu").contiguous().reshape(-1)
        if self.packed_fp4:
            return torch.stack((flat & 15, flat >> 4), dim=-1).reshape(-1).view(torch.int8)
        return flat.view(_SIGNED[self.real.itemsize])

    def any_nan(self, words: Tensor) -> bool:
        return (
            self.is_float
            and not self.packed_fp4
            and bool(words.view(self.real).to(torch.float32).isnan().any())
        )

    def values(self, words: Tensor) -> Tensor:
        """Values of a floating-point dtype, in fp64."""
        if self.packed_fp4:
            table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float64, device="cpu")
            return table[words.long()]
        return words.view(self.real).to(torch.float64)

    def ordered(self, words: Tensor) -> Tensor:
        """int64, ordered as the values are; NaNs come out as larger than infinity or below its negative."""
        wide = words.to(torch.int64)
        if self.is_float and self.is_signed:
            magnitude = wide & ((1 << (self.bits - 1)) - 1)
            negative = (wide >> (self.bits - 1)) & 1 == 1
            return torch.where(negative, -magnitude, magnitude)
        if self.is_signed:
            return wide
        return wide ^ torch.iinfo(torch.int64).min if self.bits == 64 else wide & ((1 << self.bits) - 1)
