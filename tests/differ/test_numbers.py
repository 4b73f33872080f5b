"""Distances from raw bytes agree with what torch measures on the tensors themselves."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detaudit.core.numbers import difference
from detaudit.differ.numbers import distance

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from((*FLOATS, *INTEGERS)), st.binary(min_size=64, max_size=64), st.data())
def test_as_torch_measures_it(dtype: torch.dtype, bits: bytes, data: st.DataObject) -> None:
    """Any bit patterns: infinities, NaNs, subnormals; half of the elements are left as they are."""
    other = bytearray(bits)
    for index in range(0, 64, 16):
        other[index : index + 8] = data.draw(st.binary(min_size=8, max_size=8))
    a, b = (torch.frombuffer(bytearray(x), dtype=torch.uint8).view(dtype) for x in (bits, other))
    expected = difference(a, b)
    found = distance(str(dtype).removeprefix("torch."), raw(a), raw(b))
    assert found is not None
    assert found.max_ulp == expected.max_ulp
    assert found.max_abs == pytest.approx(expected.max_abs, rel=1e-12)


def test_relative_error_is_that_of_the_vectors() -> None:
    a, b = (3.0, 4.0, 0.0), (3.0, 4.0, 0.5)
    found = distance("float64", struct.pack("<3d", *a), struct.pack("<3d", *b))
    assert found is not None
    assert found.rel_error == 0.1


def test_a_nan_against_a_number_is_infinitely_far_and_against_a_nan_is_not() -> None:
    one, nan, other_nan = (struct.pack("<f", 1.0), b"\x00\x00\xc0\x7f", b"\x01\x00\xc0\x7f")
    apart, same = distance("float32", one, nan), distance("float32", nan, other_nan)
    assert apart is not None
    assert same is not None
    assert (apart.max_abs, same.max_abs, same.max_ulp) == (math.inf, 0.0, 0)


def test_complex_numbers_are_pairs() -> None:
    a, b = torch.tensor([1 + 2j]), torch.tensor([1 + 2.0000002384185791j])
    found = distance("complex64", raw(torch.view_as_real(a)), raw(torch.view_as_real(b)))
    assert found is not None
    assert found.max_ulp == 1


def test_packed_values_have_no_distance() -> None:
    assert distance("float4_e2m1fn_x2", b"\x12", b"\x13") is None
