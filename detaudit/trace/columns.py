"""Runs as compressed columns of C ints, and lists of rows as compressed gaps.

A run that repeats an earlier one has mostly the same columns, so a column is stored as nothing at all
(equal to the base run's), as its XOR with the base run's, or as successive differences, whichever is
shortest. Both are cut into byte planes before zlib, since the high bytes are nearly all zero.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable
from itertools import accumulate, chain
from operator import sub

NAMES = ("module", "parent", "args", "state", "out", "flags")
"""The columns of a run, as in ``core.recording.RunColumns``."""

_DIFFERENCES = b"d"
_XOR = b"x"
_ITEM = 4
_LEVEL = 1


def ints(values: Iterable[int] = ()) -> array[int]:
    """An array of C ints."""
    return array("i", values)


def to_bytes(column: array[int]) -> bytes:
    """32-bit integers, little-endian."""
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def from_bytes(data: bytes) -> array[int]:
    """The inverse of ``to_bytes``. Raises ValueError where the length is not a multiple of 4."""
    column = array("i")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def pack(column: array[int], base: array[int] | None) -> bytes:
    """The shortest encoding of a column; empty where it equals the base's (or both are empty)."""
    if column == (base if base is not None else ints()):
        return b""
    differences = ints(map(sub, column, chain((0,), column)))
    packed = _DIFFERENCES + _compress(to_bytes(differences))
    if base is not None and len(base) == len(column):
        packed = min(packed, _XOR + _compress(_xor(to_bytes(column), to_bytes(base))), key=len)
    return packed


def unpack(packed: bytes, base: array[int] | None) -> array[int]:
    """The inverse of ``pack``. A column equal to its base's is that same array, so treat it as read-only.

    Raises:
        ValueError: damaged. zlib.error: damaged.
    """
    if not packed:
        return base if base is not None else ints()
    tag, data = packed[:1], _decompress(packed[1:])
    if tag == _DIFFERENCES:
        return ints(accumulate(from_bytes(data)))
    if tag == _XOR and base is not None:
        return from_bytes(_xor(data, to_bytes(base)))
    raise ValueError("a column has an unknown encoding")


def pack_rows(rows: Iterable[int]) -> bytes:
    """Ascending row indices, as compressed gaps."""
    column = array("q", rows)
    gaps = array("q", map(sub, column, chain((0,), column)))
    if sys.byteorder == "big":
        gaps.byteswap()
    return zlib.compress(gaps.tobytes(), _LEVEL)


def unpack_rows(packed: bytes) -> tuple[int, ...]:
    """The inverse of ``pack_rows``. Raises zlib.error or ValueError where damaged."""
    gaps = array("q")
    gaps.frombytes(zlib.decompress(packed))
    if sys.byteorder == "big":
        gaps.byteswap()
    return tuple(accumulate(gaps))


def _xor(a: bytes, b: bytes) -> bytes:
    if len(a) != len(b):
        raise ValueError("a column and its base differ in length")
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def _compress(data: bytes) -> bytes:
    return zlib.compress(b"".join(data[plane::_ITEM] for plane in range(_ITEM)), _LEVEL)


def _decompress(data: bytes) -> bytes:
    planes = zlib.decompress(data)
    count = len(planes) // _ITEM
    out = bytearray(len(planes))
    for plane in range(_ITEM):
        out[plane::_ITEM] = planes[plane * count : (plane + 1) * count]
    return bytes(out)
