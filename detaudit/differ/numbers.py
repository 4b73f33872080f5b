"""How far two small values lie apart, from the bytes that traces keep of them. Pure Python.

Formats: IEEE 754 binary16, 32 and 64; bfloat16, the upper half of a binary32; float8_e5m2, the upper half of
a binary16; float8_e4m3fn of the OCP 8-bit floating point specification 1.0 (bias 7, no infinities, NaN is
all ones).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distance:
    """``max_ulp`` leaves out a NaN against a number; the other two are ``math.inf`` there.

    ``rel_error``: ||b - a|| / ||a|| over the finite elements of ``a``.
    """

    max_ulp: int
    max_abs: float
    rel_error: float


@dataclass(frozen=True, slots=True)
class _Format:
    """``code`` of struct for the bits as an unsigned integer, of so many ``bits``."""

    code: str
    bits: int
    value: Callable[[int], float]


def _binary(code: str, shift: int, unsigned: str) -> Callable[[int], float]:
    def value(bits: int) -> float:
        (found,) = struct.unpack(f"<{code}", struct.pack(f"<{unsigned}", bits << shift))
        return float(found)

    return value


def _e4m3fn(bits: int) -> float:
    sign, exponent, fraction = -1.0 if bits & 0x80 else 1.0, (bits >> 3) & 15, bits & 7
    if bits & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, -9)
    return sign * math.ldexp(8 + fraction, exponent - 10)


FLOATS: Mapping[str, _Format] = {
    "float64": _Format("Q", 64, _binary("d", 0, "Q")),
    "float32": _Format("I", 32, _binary("f", 0, "I")),
    "float16": _Format("H", 16, _binary("e", 0, "H")),
    "bfloat16": _Format("H", 16, _binary("f", 16, "I")),
    "float8_e5m2": _Format("B", 8, _binary("e", 8, "H")),
    "float8_e4m3fn": _Format("B", 8, _e4m3fn),
}
COMPLEX = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}
COMPLEX |= {"bcomplex32": "bfloat16"}
INTEGERS = {"bool": "?", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i"}
INTEGERS |= {"uint64": "Q", "int64": "q"}


def distance(dtype: str, a: bytes, b: bytes) -> Distance | None:
    """Between the bytes of two tensors of one dtype and size; None for a dtype without plain numbers.

    ULPs are steps between neighbouring numbers of the format: both zeros are one number, and so are all NaNs.
    Of integers they are the plain difference, as in detaudit.core.numbers.
    """
    dtype = COMPLEX.get(dtype, dtype)
    if dtype in FLOATS:
        form = FLOATS[dtype]
        bits_a, bits_b = _unpack(form.code, a), _unpack(form.code, b)
        steps = [_step(form, x) - _step(form, y) for x, y in zip(bits_a, bits_b, strict=True)]
        return _distance(steps, list(map(form.value, bits_a)), list(map(form.value, bits_b)))
    if dtype in INTEGERS:
        ints_a, ints_b = _unpack(INTEGERS[dtype], a), _unpack(INTEGERS[dtype], b)
        steps = [int(x) - int(y) for x, y in zip(ints_a, ints_b, strict=True)]
        return _distance(steps, list(map(float, ints_a)), list(map(float, ints_b)))
    return None


def _unpack(code: str, raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // struct.calcsize(f'<{code}')}{code}", raw)


def _step(form: _Format, pattern: int) -> int:
    """The number's place among all of its format; sign and magnitude become one line."""
    sign = 1 << (form.bits - 1)
    return -(pattern & (sign - 1)) if pattern & sign else pattern


def _distance(steps: list[int], a: list[float], b: list[float]) -> Distance:
    gaps = [_gap(x, y) for x, y in zip(a, b, strict=True)]
    # A NaN has no place among the numbers.
    counted = [abs(n) for n, x, y in zip(steps, a, b, strict=True) if x == x and y == y]
    whole, error = math.hypot(*filter(math.isfinite, a)), math.hypot(*gaps)
    relative = error / whole if whole else (math.inf if error else 0.0)
    return Distance(max(counted, default=0), max(gaps, default=0.0), relative)


def _gap(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(y - x) if math.isfinite(x) and math.isfinite(y) else math.inf
