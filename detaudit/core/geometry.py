"""How a tensor's bytes are cut into leaves, and how leaves become a root. No torch in here.

A tensor is the row-major sequence of its elements' bytes; a row is its last dimension. Rows of 256 bytes or
more start their own leaves, cut every 65,536 bytes. Shorter rows are one leaf each up to 65,536 rows; beyond
that, ``ceil(256 / row_bytes)`` rows share a leaf. Leaf: XXH3-64, seed 0. Root: XXH3-128 of the header
``dtype|d0,d1,...\\n`` and the leaf digests, little-endian. docs/digest.md shows the recomputation.

The digest is not cryptographic: it tells accidents apart, not forgeries.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from sys import byteorder

import xxhash

LEAF_BYTES = 65_536
"""Longest leaf: a long row is cut every so many bytes."""
SHORT_ROW_BYTES = 256
"""Rows shorter than this can share a leaf."""
SINGLE_ROW_LEAVES = 65_536
"""Up to so many short rows, each is a leaf of its own."""
LEAF_DIGEST_BYTES = 8
RAW_BYTES = 4096
"""Values of at most this size keep their bytes (``Value.raw``)."""
UNPACKED_BYTES = 512
"""Up to this length, copying leaves out inside ``struct`` is faster than slicing a memoryview in Python."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 9)},
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (16, 32, 64)},
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "bcomplex32": 4,
    "complex64": 8,
    "complex128": 16,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
    "qint8": 1,
    "quint8": 1,
    "quint4x2": 1,
    "quint2x4": 1,
    "qint32": 4,
}
"""Bytes per element by torch's dtype name (``str(dtype)`` without ``torch.``)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The leaves of one tensor.

    Args:
        rows: product of all dimensions but the last; 1 for a 0-d tensor, 0 for an empty one.
        row_bytes: bytes of one row; 0 for an empty tensor.
        rows_per_leaf: 1, or how many short rows share a leaf (the last leaf may hold fewer).
        leaves_per_row: 1, or into how many leaves a long row is cut.
        leaves: number of leaves.
    """

    rows: int
    row_bytes: int
    rows_per_leaf: int
    leaves_per_row: int
    leaves: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def leaf_bounds(self, leaf: int) -> tuple[int, int]:
        """First byte of a leaf and one past its last, in the row-major bytes. Raises IndexError."""
        if not 0 <= leaf < self.leaves:
            raise IndexError(f"leaf {leaf} of {self.leaves}")
        if self.leaves_per_row > 1:
            row, piece = divmod(leaf, self.leaves_per_row)
            start = row * self.row_bytes + piece * LEAF_BYTES
            return start, min(start + LEAF_BYTES, (row + 1) * self.row_bytes)
        start = leaf * self.rows_per_leaf * self.row_bytes
        return start, min(start + self.rows_per_leaf * self.row_bytes, self.nbytes)

    def rows_of_leaf(self, leaf: int) -> range:
        """The rows a leaf has bytes of. Raises IndexError."""
        if not 0 <= leaf < self.leaves:
            raise IndexError(f"leaf {leaf} of {self.leaves}")
        first = leaf // self.leaves_per_row * self.rows_per_leaf
        return range(first, min(first + self.rows_per_leaf, self.rows))


def geometry(shape: Sequence[int], item_bytes: int) -> Geometry:
    """Leaves of a tensor of this shape with elements of ``item_bytes`` bytes."""
    rows = math.prod(shape[:-1])
    row_bytes = (shape[-1] if shape else 1) * item_bytes
    if rows == 0 or row_bytes == 0:
        return Geometry(rows=0, row_bytes=0, rows_per_leaf=1, leaves_per_row=1, leaves=0)
    if row_bytes >= SHORT_ROW_BYTES:
        pieces = -(-row_bytes // LEAF_BYTES)
        return Geometry(rows, row_bytes, rows_per_leaf=1, leaves_per_row=pieces, leaves=rows * pieces)
    group = 1 if rows <= SINGLE_ROW_LEAVES else -(-SHORT_ROW_BYTES // row_bytes)
    return Geometry(rows, row_bytes, rows_per_leaf=group, leaves_per_row=1, leaves=-(-rows // group))


def leaf_digests(buffer: bytes | bytearray | memoryview, shape: Sequence[int], item_bytes: int) -> bytes:
    """XXH3-64 of every leaf, 8 bytes each, little-endian, in order.

    Args:
        buffer: the tensor's bytes in row-major order.

    Raises:
        ValueError: the buffer's size is not that of the shape.
    """
    cut = geometry(shape, item_bytes)
    view = memoryview(buffer).cast("B")
    if len(view) != cut.nbytes:
        raise ValueError(f"{len(view)} bytes given for a tensor of {cut.nbytes} bytes")
    if cut.row_bytes > LEAF_BYTES and cut.row_bytes % LEAF_BYTES:
        rows = (view[at : at + cut.row_bytes] for at in range(0, len(view), cut.row_bytes))
        digests = array("Q", chain.from_iterable(_digests_every(row, LEAF_BYTES) for row in rows))
    else:
        digests = _digests_every(view, min(cut.rows_per_leaf * cut.row_bytes, LEAF_BYTES) or 1)
    if byteorder == "big":
        digests.byteswap()
    return digests.tobytes()


def _digests_every(view: memoryview, step: int) -> array[int]:
    """XXH3-64 of each ``step`` bytes, the last possibly fewer."""
    hash64 = xxhash.xxh3_64_intdigest
    if step > UNPACKED_BYTES:
        return array("Q", [hash64(view[at : at + step]) for at in range(0, len(view), step)])
    whole = len(view) // step * step
    digests = array("Q", starmap(hash64, struct.iter_unpack(f"{step}s", view[:whole])))
    if whole < len(view):
        digests.append(hash64(view[whole:]))
    return digests


def header(dtype: str, shape: Sequence[int]) -> bytes:
    """What the root hashes before the leaves: ``float32|1024,512\\n``."""
    return f"{dtype}|{','.join(map(str, shape))}\n".encode("ascii")


def root_of(dtype: str, shape: Sequence[int], leaves: bytes) -> bytes:
    """XXH3-128 root, 16 bytes in canonical (big-endian) order, so that ``.hex()`` is xxhash's hexdigest."""
    digest: bytes = xxhash.xxh3_128_digest(header(dtype, shape) + leaves)
    return digest


def rows_differing(dtype: str, shape: Sequence[int], leaves_a: bytes, leaves_b: bytes) -> tuple[int, ...]:
    """Rows (all dimensions but the last, flattened) that have a differing leaf, ascending.

    Where short rows share a leaf, all rows of a differing leaf are given: it cannot be told which of them
    differs. A host scalar is one row.

    Raises:
        ValueError: the leaves do not belong to a tensor of this dtype and shape.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        return () if leaves_a == leaves_b else (0,)
    cut = geometry(shape, item_bytes)
    expected = cut.leaves * LEAF_DIGEST_BYTES
    if len(leaves_a) != expected or len(leaves_b) != expected:
        raise ValueError(f"{len(leaves_a)} and {len(leaves_b)} bytes of leaves given, {expected} expected")
    if leaves_a == leaves_b:
        return ()
    pairs = zip(memoryview(leaves_a).cast("Q"), memoryview(leaves_b).cast("Q"), strict=True)
    differing = (cut.rows_of_leaf(leaf) for leaf, (a, b) in enumerate(pairs) if a != b)
    return tuple(dict.fromkeys(chain.from_iterable(differing)))
