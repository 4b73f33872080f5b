"""The numbers in values small enough to have kept their bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from detaudit.core.recording import Value

_FORMATS = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "complex128": "d",
    "complex64": "f",
    "complex32": "e",
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


def numbers(value: Value) -> Sequence[float] | None:
    """Floating-point numbers of a value, complex ones as pairs; ``None`` where they cannot be told."""
    if value.raw is None:
        return None
    if value.dtype in ("bfloat16", "bcomplex32"):  # the upper half of a float32
        widened = bytearray(2 * len(value.raw))
        widened[2::4], widened[3::4] = value.raw[::2], value.raw[1::2]
        return struct.unpack(f"<{len(value.raw) // 2}f", widened)
    if value.dtype == "python.float":
        return _scalar(value.raw)
    code = _FORMATS.get(value.dtype)
    if code is None:
        return None
    return struct.unpack(f"<{len(value.raw) // struct.calcsize(code)}{code}", value.raw)


def values_equal(a: Value, b: Value) -> bool | None:
    """Whether values that differ in bits are equal as numbers (-0.0 and 0.0, two NaNs).

    ``None`` where it cannot be told.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype in _INTEGERS:
        return False
    left, right = numbers(a), numbers(b)
    if left is None or right is None:
        return None
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(left, right, strict=True))


def has_nan(value: Value) -> bool:
    """Whether a value is known to hold a NaN."""
    return any(map(math.isnan, numbers(value) or ()))


def _scalar(raw: bytes) -> Sequence[float] | None:
    text = raw.decode(errors="replace")
    for read in (float, float.fromhex):
        try:
            return (read(text),)
        except ValueError:
            continue
    return None
