"""Leaves and roots without torch: the published vectors, the definition, what a flipped bit changes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detaudit.core.geometry import (
    ITEM_BYTES,
    geometry,
    leaf_digests,
    root_of,
    rows_differing,
)
from tests.core.plain_digest import pattern, plain_digests, plain_leaves, plain_root

VECTORS = json.loads(Path(__file__).with_name("digest_vectors.json").read_text())

short_rows = st.tuples(st.integers(0, 40), st.integers(0, 70))
long_rows = st.tuples(
    st.integers(1, 3), st.sampled_from([255, 256, 257, 65535, 65536, 65537, 131072, 140000])
)
many_rows = st.tuples(st.sampled_from([65535, 65536, 65537, 65600, 70001]), st.integers(1, 5))
deep = st.lists(st.integers(0, 5), max_size=5).map(tuple)
shapes = st.one_of(short_rows, long_rows, many_rows, deep)


def filled(shape: tuple[int, ...], item_bytes: int, seed: int) -> bytes:
    return (seed.to_bytes(8, "little") + pattern(251) * (1 + math.prod(shape) * item_bytes // 251))[
        : math.prod(shape) * item_bytes
    ]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['dtype']}-{v['shape']}")
def test_published_vectors(vector: dict[str, Any]) -> None:
    item = ITEM_BYTES[vector["dtype"]]
    buffer = pattern(math.prod(vector["shape"]) * item, vector["salt"])
    if vector["dtype"] == "bool":
        buffer = bytes(byte & 1 for byte in buffer)
    leaves = leaf_digests(buffer, vector["shape"], item)
    assert len(leaves) == 8 * vector["leaves"]
    assert root_of(vector["dtype"], vector["shape"], leaves).hex() == vector["root"]
    if leaves:
        assert leaves[:8][::-1].hex() == vector["first_leaf"]
        assert leaves[-8:][::-1].hex() == vector["last_leaf"]


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(sorted(ITEM_BYTES)), seed=st.integers(0, 2**64 - 1))
def test_equals_the_plain_construction(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    item = ITEM_BYTES[dtype]
    buffer = filled(shape, item, seed)
    leaves = leaf_digests(buffer, shape, item)
    assert leaves == plain_digests(buffer, shape, item)
    assert root_of(dtype, shape, leaves).hex() == plain_root(dtype, buffer, shape, item)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, item=st.sampled_from([1, 2, 4, 8, 16]))
def test_leaf_bounds_cut_the_bytes_without_gap(shape: tuple[int, ...], item: int) -> None:
    buffer = filled(shape, item, 7)
    cut = geometry(shape, item)
    bounds = [cut.leaf_bounds(leaf) for leaf in range(cut.leaves)]
    assert [buffer[start:end] for start, end in bounds] == plain_leaves(buffer, shape, item)
    for leaf, (start, end) in enumerate(bounds):
        assert cut.rows_of_leaf(leaf) == range(start // cut.row_bytes, (end - 1) // cut.row_bytes + 1)
    with pytest.raises(IndexError):
        cut.leaf_bounds(cut.leaves)
    with pytest.raises(IndexError):
        cut.rows_of_leaf(-1)


@settings(max_examples=80, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]), data=st.data())
def test_a_flipped_bit_changes_the_root_and_only_its_leaf(
    shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    item = ITEM_BYTES[dtype]
    buffer = bytearray(filled(shape, item, 11))
    before = leaf_digests(buffer, shape, item)
    if not buffer:
        assert before == b""
        return
    bit = data.draw(st.integers(0, 8 * len(buffer) - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    after = leaf_digests(buffer, shape, item)
    cut = geometry(shape, item)
    changed = [leaf for leaf in range(cut.leaves) if before[8 * leaf :][:8] != after[8 * leaf :][:8]]
    assert len(changed) == 1
    start, end = cut.leaf_bounds(changed[0])
    assert start <= bit // 8 < end
    assert root_of(dtype, shape, before) != root_of(dtype, shape, after)
    assert rows_differing(dtype, shape, before, after) == tuple(cut.rows_of_leaf(changed[0]))
    assert bit // 8 // cut.row_bytes in rows_differing(dtype, shape, before, after)


def test_exchanged_leaves_change_the_root() -> None:
    a, b = bytes(256), bytes(255) + b"\1"
    first, second = (leaf_digests(pair, (2, 256), 1) for pair in (a + b, b + a))
    assert sorted((first[:8], first[8:])) == sorted((second[:8], second[8:]))
    assert root_of("uint8", (2, 256), first) != root_of("uint8", (2, 256), second)


def test_dtype_and_shape_are_in_the_root() -> None:
    buffer = bytes(1024)
    roots = {
        root_of(dtype, shape, leaf_digests(buffer, shape, ITEM_BYTES[dtype]))
        for dtype, shape in [
            ("float32", (256,)),
            ("int32", (256,)),
            ("float32", (1, 256)),
            ("float32", (256, 1)),
            ("bfloat16", (512,)),
        ]
    }
    assert len(roots) == 5


def test_a_long_row_is_named_once_however_many_of_its_leaves_differ() -> None:
    shape = (3, 140_000)
    before = leaf_digests(bytes(3 * 140_000), shape, 1)
    after = leaf_digests(bytes(140_000) + b"\1" * 140_000 + bytes(140_000), shape, 1)
    assert rows_differing("uint8", shape, before, after) == (1,)
    assert rows_differing("uint8", shape, before, before) == ()


def test_rows_of_a_scalar() -> None:
    assert rows_differing("python.int", (), b"12345678", b"12345678") == ()
    assert rows_differing("python.int", (), b"12345678", b"12345679") == (0,)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="3 bytes given for a tensor of 4 bytes"):
        leaf_digests(b"abc", (4,), 1)
    with pytest.raises(ValueError, match="8 expected"):
        rows_differing("uint8", (4,), b"", b"")


def test_needs_no_torch() -> None:
    code = "import sys, detaudit.core.geometry; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
