"""NVFP4 built a second time, in exact rational arithmetic, one value at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction


def e2m1_value(code: int) -> Fraction:
    """The definition: sign, two exponent bits with bias 1, one mantissa bit, subnormals at exponent 0."""
    exponent, mantissa = (code >> 1) & 3, Fraction(code & 1, 2)
    magnitude = mantissa if exponent == 0 else (1 + mantissa) * 2 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e4m3_value(code: int) -> Fraction | None:
    """The definition: sign, four exponent bits with bias 7, three mantissa bits; None is NaN."""
    exponent, mantissa = (code >> 3) & 15, Fraction(code & 7, 8)
    if exponent == 15 and code & 7 == 7:
        return None
    magnitude = (
        mantissa * Fraction(1, 64) if exponent == 0 else (1 + mantissa) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if code & 0x80 else magnitude


E2M1 = [e2m1_value(code) for code in range(8)]
E4M3 = [value for code in range(128) if (value := e4m3_value(code)) is not None]


def nearest_even(x: float, magnitudes: Sequence[Fraction], sign_bit: int) -> int:
    """Code of the magnitude nearest to ``x`` of all there are, ties to the even code, with its sign."""
    sign = sign_bit if math.copysign(1.0, x) < 0 else 0
    if math.isinf(x):
        return sign | (len(magnitudes) - 1)
    target = abs(Fraction(x))
    best = min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - target), code % 2))
    return sign | best


def f32(x: float) -> float:
    """``x`` rounded to float32, overflowing to infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def f32_neighbours(x: float) -> tuple[float, float]:
    """The float32 values next below and next above ``x`` (a float32 other than zero)."""
    bits = struct.unpack("<i", struct.pack("<f", x))[0]
    lower, upper = (struct.unpack("<f", struct.pack("<i", bits + step))[0] for step in (-1, 1))
    return (lower, upper) if x > 0 else (upper, lower)


def quantize_block(block: Sequence[float], scale: float) -> tuple[list[int], int]:
    """E2M1 codes and E4M3 scale code of up to 16 float32 values; every operation rounds to float32 once.

    A product or quotient of two float32 values, computed in double and then rounded, is correctly rounded.
    """
    amax = max((abs(x) for x in block if not math.isnan(x)), default=0.0)
    sixth = f32(1.0 / 6.0)
    scale_code = nearest_even(f32(amax * f32(scale * sixth)), E4M3, 0x80)
    decoded = float(E4M3[scale_code])
    inverse = 0.0
    if decoded:
        inverse = min(f32(1.0 / f32(decoded * f32(1.0 / scale))), f32(3.4028234663852886e38))
    return [7 if math.isnan(x) else nearest_even(f32(x * inverse), E2M1, 8) for x in block], scale_code
