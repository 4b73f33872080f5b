"""What the kernel has to do for a tensor of one dtype, shape, stride and alignment. Pure; no torch.

``Source`` in xxh3.cu has the same layout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from detaudit.core.geometry import LEAF_BYTES, LEAF_DIGEST_BYTES, RAW_BYTES, Geometry, geometry

THREADS = 256
MAX_DIMS = 4
MAX_SOURCES = 8
SOURCE = struct.Struct(f"<2Q2I2Q{MAX_DIMS}Q{MAX_DIMS}Q6I")
ADDRESSES = struct.Struct("<2QI")
"""``base``, ``out`` and ``first_block``: what is filled in at each launch."""
COUNT = struct.Struct("<I")
"""Number of sources, at the front of a batch."""
SOURCES_OFFSET = 16
BATCH_BYTES = SOURCES_OFFSET + SOURCE.size * MAX_SOURCES
SLOT_ALIGNMENT = 16
MAX_LEAVES = 1 << 31
"""Leaf indices are 32-bit on the device."""

SHORT_BYTES = 240
"""XXH3 has its own formulas up to this length."""
NARROW_BYTES = 512
"""Up to this length four threads per leaf are fastest, however few leaves there are (measured on an H200)."""
BLOCK_BYTES = 2048
"""Leaves longer than this get a thread block each while all of these can be resident at once."""


class Kind(IntEnum):
    """How threads are assigned to leaves; the numbers are those of xxh3.cu."""

    COPY = 0
    THREAD_PER_LEAF = 1
    GROUP_OF_4 = 2
    GROUP_OF_8 = 3
    GROUP_OF_16 = 4
    GROUP_OF_32 = 5
    BLOCK_PER_LEAF = 6


_THREADS_PER_LEAF = {
    Kind.THREAD_PER_LEAF: 1,
    Kind.GROUP_OF_4: 4,
    Kind.GROUP_OF_8: 8,
    Kind.GROUP_OF_16: 16,
    Kind.GROUP_OF_32: 32,
    Kind.BLOCK_PER_LEAF: THREADS,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Work for one tensor.

    Args:
        dtype, shape, item_bytes: of the tensor.
        kind: COPY for small tensors, which travel as raw bytes.
        out_bytes: bytes written to the ring: the leaf digests, or the raw bytes.
        slot_bytes: bytes reserved for them.
        blocks: thread blocks that it can use.
        packed: ``Source`` with ``base``, ``out`` and ``first_block`` left at 0.
    """

    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    kind: Kind
    out_bytes: int
    slot_bytes: int
    blocks: int
    packed: bytes


def plan(
    dtype: str, shape: Sequence[int], strides: Sequence[int], item_bytes: int, address: int, max_blocks: int
) -> Plan | None:
    """Plan for a tensor with these strides (in elements), or None if it must be made contiguous first.

    Args:
        address: of its first byte; only the lowest four bits matter.
        max_blocks: thread blocks that can be resident at a time.

    Raises:
        ValueError: it has more leaves than the device can count.
    """
    cut = geometry(shape, item_bytes)
    if cut.leaves >= MAX_LEAVES:
        raise ValueError(f"{cut.leaves:,} leaves, more than {MAX_LEAVES:,}")
    small = cut.nbytes <= RAW_BYTES
    rows = _runs(shape, strides, item_bytes) if small else _rows(shape, strides, item_bytes, cut)
    if rows is None:
        return None
    dims, row_bytes = rows
    kind = Kind.COPY if small else _kind(cut, max_blocks)
    alignment = _alignment(address, dims, cut)
    wanted = cut.nbytes if small else cut.leaves * _THREADS_PER_LEAF[kind]
    blocks = min(-(-wanted // THREADS), max_blocks)
    filler = [0] * (MAX_DIMS - len(dims))
    packed = SOURCE.pack(
        *(0, 0, 0, blocks),
        math.prod(size for size, _ in dims),
        row_bytes,
        *(stride for _, stride in dims),
        *filler,
        *(size for size, _ in dims),
        *filler,
        len(dims),
        cut.rows_per_leaf,
        cut.leaves_per_row,
        cut.leaves,
        kind,
        alignment,
    )
    out_bytes = cut.nbytes if small else cut.leaves * LEAF_DIGEST_BYTES
    slot_bytes = -(-out_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return Plan(dtype, tuple(shape), item_bytes, kind, out_bytes, slot_bytes, blocks, packed)


Dims = list[tuple[int, int]]
"""(size, stride in bytes), outermost first."""


def _collapsed(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Dims:
    """Dimensions merged wherever one steps over exactly the extent of the next."""
    dims: Dims = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride * item_bytes:
            dims[-1] = (dims[-1][0] * size, stride * item_bytes)
        else:
            dims.append((size, stride * item_bytes))
    return dims


def _rows(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int, cut: Geometry
) -> tuple[Dims, int] | None:
    """Rows as the geometry has them, each contiguous."""
    if shape and shape[-1] > 1 and strides[-1] != 1:
        return None
    dims = _collapsed(shape[:-1], strides[:-1], item_bytes) or [(1, cut.row_bytes)]
    dense = dims in ([(cut.rows, cut.row_bytes)], [(1, cut.row_bytes)])
    if len(dims) > MAX_DIMS or (cut.rows_per_leaf > 1 and not dense):
        return None
    return dims, cut.row_bytes


def _runs(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[Dims, int] | None:
    """The longest contiguous runs, whatever rows they are of: all that a copy needs."""
    if 0 in shape:
        return [(1, 0)], 0
    dims = _collapsed(shape, strides, item_bytes)
    run = item_bytes
    if dims and dims[-1][1] == item_bytes:
        run = dims.pop()[0] * item_bytes
    return None if len(dims) > MAX_DIMS else (dims or [(1, run)], run)


def _kind(cut: Geometry, max_blocks: int) -> Kind:
    """Few threads per leaf read fastest, as long as there are enough leaves to keep the device busy."""
    longest = min(cut.rows_per_leaf * cut.row_bytes, LEAF_BYTES)
    if longest <= SHORT_BYTES:
        return Kind.THREAD_PER_LEAF
    if longest <= NARROW_BYTES:
        return Kind.GROUP_OF_4
    if longest > BLOCK_BYTES and cut.leaves <= max_blocks:
        return Kind.BLOCK_PER_LEAF
    for kind in (Kind.GROUP_OF_8, Kind.GROUP_OF_16):
        if cut.leaves * _THREADS_PER_LEAF[kind] >= max_blocks * THREADS // 2:
            return kind
    return Kind.GROUP_OF_32 if longest > BLOCK_BYTES else Kind.GROUP_OF_16


def _alignment(address: int, dims: Dims, cut: Geometry) -> int:
    """16, 8 or 4 (which stands for any): a divisor of the address of every leaf's first byte if above 4."""
    if cut.rows_per_leaf > 1:
        steps = [address & 15, cut.rows_per_leaf * cut.row_bytes]
    else:
        steps = [address & 15, *(stride for size, stride in dims if size > 1)]
    for alignment in (16, 8):
        if all(step % alignment == 0 for step in steps):
            return alignment
    return 4
