"""ULPs, absolute differences and rows, against definitions written out in Python integers and floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from detaudit.core import numbers
from detaudit.core.digest import dtype_name
from detaudit.core.numbers import difference

FLOATS = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def signed(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def from_bits(dtype: torch.dtype, bits: list[int]) -> Tensor:
    top = 1 << 8 * dtype.itemsize
    words = [b - top if b >= top // 2 else b for b in bits]
    return torch.tensor(words, dtype=signed(dtype)).view(dtype)


@st.composite
def bit_pairs(draw: st.DrawFn, dtypes: list[torch.dtype]) -> tuple[torch.dtype, list[int], list[int]]:
    dtype = draw(st.sampled_from(dtypes))
    patterns = st.integers(0, (1 << 8 * dtype.itemsize) - 1)
    a = draw(st.lists(patterns, min_size=1, max_size=12))
    b = [draw(st.one_of(st.just(x), st.sampled_from([x ^ 1]), patterns)) for x in a]
    return dtype, a, b


def steps(dtype: torch.dtype, a: int, b: int) -> int:
    """Representable values between two patterns of a sign-magnitude format."""
    half = 1 << (8 * dtype.itemsize - 1)
    x, y = (-(p - half) if p >= half else p for p in (a, b))
    return abs(x - y)


@settings(max_examples=150, deadline=None)
@given(pair=bit_pairs(FLOATS))
def test_floats(pair: tuple[torch.dtype, list[int], list[int]]) -> None:
    dtype, bits_a, bits_b = pair
    a, b = from_bits(dtype, bits_a), from_bits(dtype, bits_b)
    found = difference(a, b)
    values = list(zip(a.double().tolist(), b.double().tolist(), bits_a, bits_b, strict=True))
    both = [(x, y, p, q) for x, y, p, q in values if not (math.isnan(x) or math.isnan(y))]
    one_sided = sum(math.isnan(x) != math.isnan(y) for x, y, _, _ in values)
    assert found.max_ulp == max((steps(dtype, p, q) for _, _, p, q in both), default=0)
    gaps = [0.0 if x == y else abs(x - y) for x, y, _, _ in both] + [math.inf] * bool(one_sided)
    assert found.max_abs == max(gaps, default=0.0)
    assert found.value_equal == all(x == y or (math.isnan(x) and math.isnan(y)) for x, y, _, _ in values)
    assert found.has_nan == any(math.isnan(x) or math.isnan(y) for x, y, _, _ in values)
    assert found.elements_differing == sum(p != q for p, q in zip(bits_a, bits_b, strict=True))
    assert sum(found.ulp_histogram.values()) == found.elements_differing
    assert found.ulp_histogram.get("nan", 0) == one_sided


@settings(max_examples=100, deadline=None)
@given(pair=bit_pairs(INTEGERS))
def test_integers(pair: tuple[torch.dtype, list[int], list[int]]) -> None:
    dtype, bits_a, bits_b = pair
    a, b = from_bits(dtype, bits_a), from_bits(dtype, bits_b)
    found = difference(a, b)
    gaps = [abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.max_ulp == max(gaps)
    assert found.max_abs == float(max(gaps))
    assert found.value_equal == (a.tolist() == b.tolist())
    expected: dict[str, int] = {}
    for gap in gaps:
        if gap:
            key = str(1 << (gap.bit_length() - 1))
            expected[key] = expected.get(key, 0) + 1
    assert found.ulp_histogram == expected
    assert list(found.ulp_histogram) == sorted(expected, key=int)


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=dtype_name)
def test_one_step_is_one_ulp(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, -2.0, 0.0, 3e-5], dtype=dtype)
    found = difference(a, torch.nextafter(a, torch.full_like(a, 100.0)))
    assert (found.max_ulp, dict(found.ulp_histogram)) == (1, {"1": 4})


def test_zeros_and_nans_are_equal_in_value() -> None:
    a = from_bits(torch.float32, [0, 0x7FC00000, 0x3F800000])
    b = from_bits(torch.float32, [0x80000000, 0xFFC00001, 0x3F800000])
    found = difference(a, b)
    assert found.value_equal
    assert found.has_nan
    assert (found.max_ulp, found.max_abs, found.elements_differing) == (0, 0.0, 2)
    assert found.ulp_histogram == {"0": 2}


def test_equal_tensors() -> None:
    a = torch.tensor([[1.0, math.inf], [math.nan, -0.0]])
    found = difference(a, a.clone())
    assert found.value_equal
    assert (found.max_ulp, found.max_abs, found.rows, found.rows_differing, found.rows_total) == (
        0,
        0,
        (),
        0,
        2,
    )


def test_infinity_is_infinitely_far() -> None:
    found = difference(torch.tensor([3.4028235e38]), torch.tensor([math.inf]))
    assert (found.max_ulp, found.max_abs) == (1, math.inf)


def test_the_whole_range_of_64_bits() -> None:
    low, high = torch.tensor([-(2**63)]), torch.tensor([2**63 - 1])
    assert difference(low, high).max_ulp == 2**64 - 1
    ends = from_bits(torch.float64, [0xFFEFFFFFFFFFFFFF]), from_bits(torch.float64, [0x7FEFFFFFFFFFFFFF])
    assert difference(*ends).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF
    assert difference(*ends).ulp_histogram == {str(1 << 63): 1}


def test_complex_counts_both_parts() -> None:
    a = torch.zeros(2, 3, dtype=torch.complex128)
    b = a.clone()
    b[1, 2] += torch.complex(torch.tensor(1.0), torch.tensor(2.0))
    found = difference(a, b)
    assert (found.elements_differing, found.max_abs, found.rows) == (2, 2.0, (1,))
    assert difference(a.to(torch.complex64), b.to(torch.complex64)).max_abs == 2.0
    assert difference(a.conj(), b.conj()).elements_differing == 2


def test_packed_fp4_counts_both_halves() -> None:
    a = torch.tensor([[0x00, 0x71]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b = torch.tensor([[0x80, 0xF1]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    found = difference(a, b)
    # 0.0 against -0.0 in the first byte's high half; 6.0 against -6.0 in the second's.
    assert (found.elements_differing, found.max_abs, found.max_ulp) == (2, 12.0, 14)
    assert found.ulp_histogram == {"0": 1, "8": 1}


def test_exponent_only_fp8() -> None:
    a = torch.tensor([127, 128, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    b = torch.tensor([128, 128, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = difference(a, b)
    assert (found.max_ulp, found.max_abs, found.has_nan) == (1, 1.0, True)


def test_bool() -> None:
    found = difference(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.max_ulp, found.max_abs, found.value_equal) == (1, 1.0, False)


def test_rows_over_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(7, 5, 11)
    b = a.clone()
    changed = [0, 1, 4, 17, 18, 34]
    b.view(-1, 11)[changed] = 1.0
    whole = difference(a, b)
    assert whole.rows == tuple(changed)
    assert (whole.rows_differing, whole.rows_total, whole.elements_differing) == (6, 35, 66)
    for size in (3, 11, 12, 60, 110):
        monkeypatch.setattr(numbers, "CHUNK_ELEMENTS", size)
        assert difference(a, b) == whole
        assert difference(a.permute(2, 0, 1).contiguous().permute(1, 2, 0), b) == whole


def test_rows_listed_are_limited() -> None:
    found = difference(torch.zeros(5000, 2), torch.ones(5000, 2))
    assert (len(found.rows), found.rows_differing) == (4096, 5000)
    assert found.rows == tuple(range(4096))


def test_empty_and_scalar_tensors() -> None:
    assert difference(torch.empty(0, 3), torch.empty(0, 3)).rows_total == 0
    assert difference(torch.empty(3, 0), torch.empty(3, 0)).value_equal
    assert difference(torch.tensor(1.0), torch.tensor(2.0)).rows == (0,)


def test_unlike_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        difference(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="cannot compare"):
        difference(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
