"""The CUDA kernel's source, compiled for the CPU, against xxhash: every length class, stride and alignment.

The same tests run on a GPU in tests/gpu/test_device_digest.py; here fibers stand for threads, so that the
arithmetic, the work split and the bounds of every read are checked on any machine with a C++ compiler.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detaudit.core.device import plan as plans
from detaudit.core.device.plan import Kind, Plan, plan
from tests.core.plain_digest import pattern, plain_digests

HERE = Path(__file__).parent
KERNEL = Path(plans.__file__).with_name("xxh3.cu")
MAX_BLOCKS = 5
"""Few, so that blocks go round their loops more than once."""


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    source = HERE / "cuda_on_cpu.cpp"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", f'-DKERNEL="{KERNEL}"']
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides in elements, offset of the first element."""


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def gathered(memory: bytes, shape: tuple[int, ...], strides: tuple[int, ...], start: int, item: int) -> bytes:
    if not shape:
        return memory[start : start + item]
    if shape[-1:] and strides[-1] == 1 and len(shape) == 1:
        return memory[start : start + shape[0] * item]
    step = strides[0] * item
    return b"".join(gathered(memory, shape[1:], strides[1:], start + i * step, item) for i in range(shape[0]))


def run(kernel: ctypes.CDLL, work: list[tuple[Plan, int]], low: int, high: int) -> list[bytes]:
    """Launch the kernel once over (plan, address) pairs in memory from ``low`` to ``high``."""
    batch = bytearray(plans.BATCH_BYTES)
    outs = [ctypes.create_string_buffer(b"\xaa" * item.slot_bytes, item.slot_bytes) for item, _ in work]
    blocks = 0
    for i, ((item, address), out) in enumerate(zip(work, outs, strict=True)):
        at = plans.SOURCES_OFFSET + i * plans.SOURCE.size
        batch[at : at + plans.SOURCE.size] = item.packed
        plans.ADDRESSES.pack_into(batch, at, address, ctypes.addressof(out), blocks)
        blocks += item.blocks
    plans.COUNT.pack_into(batch, 0, len(work))
    buffer = ctypes.create_string_buffer(bytes(batch), len(batch))
    assert kernel.launch(buffer, blocks, ctypes.c_uint64(low), ctypes.c_uint64(high)) == 0, "deadlock"
    for (item, _), out in zip(work, outs, strict=True):
        assert out.raw[item.out_bytes :] == b"\xaa" * (item.slot_bytes - item.out_bytes)
    return [out.raw[: item.out_bytes] for (item, _), out in zip(work, outs, strict=True)]


def check(
    kernel: ctypes.CDLL, shape: tuple[int, ...], strides: tuple[int, ...], item: int, shift: int = 0
) -> Plan:
    """Digest a tensor that starts ``shift`` bytes after a multiple of 64, in memory that ends with it."""
    size = extent(shape, strides) * item
    memory = pattern(251) * (size // 251 + 1)
    storage = ctypes.create_string_buffer(size + shift + 64)
    start = (ctypes.addressof(storage) + 63) // 64 * 64 + shift
    ctypes.memmove(start, memory, size)
    made = plan("uint8", shape, strides, item, start, MAX_BLOCKS)
    assert made is not None
    (out,) = run(kernel, [(made, start)], start, start + size)
    expected = gathered(memory, shape, strides, 0, item)
    assert out == (expected if made.kind is Kind.COPY else plain_digests(expected, shape, item))
    return made


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])


SHORT = list(range(1, 241))


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4, 8])
def test_every_short_length(kernel: ctypes.CDLL, shift: int) -> None:
    for length in SHORT[shift % 3 :: 3]:
        rows = 4097 // length + 3
        made = check(kernel, (rows, length), (length, 1), 1, shift)
        assert made.kind is Kind.THREAD_PER_LEAF


NARROW = [241, 255, 256, 257, 320, 383, 511, 512]
MIDDLE = [513, 700, 960, 1016, 1023, 1024, 1025, 1088, 1089, 1536, 2047, 2048]
LONG = [2049, 3072, 3100, 4095, 4096, 4097, 5120, 8192, 8193]
LONGEST = [12289, 16384, 16385, 65535, 65536, 65537, 66000, 131072, 140001]
FEW, SOME, MORE, MANY = 5, 21, 41, 81
"""Leaves that make the plan choose, with so few thread blocks, a block, 32, 16 or 8 threads for each."""


@pytest.mark.parametrize("shift", [0, 3, 8])
@pytest.mark.parametrize(
    ("kind", "rows", "lengths"),
    [
        (Kind.GROUP_OF_4, SOME, NARROW),
        (Kind.GROUP_OF_8, MANY, MIDDLE + LONG),
        (Kind.GROUP_OF_16, SOME, MIDDLE),
        (Kind.GROUP_OF_16, MORE, LONG),
        (Kind.GROUP_OF_32, SOME, LONG + LONGEST[:5]),
        (Kind.BLOCK_PER_LEAF, FEW, LONG + LONGEST),
    ],
)
def test_long_leaves(kernel: ctypes.CDLL, kind: Kind, rows: int, lengths: list[int], shift: int) -> None:
    for length in lengths:
        cut_rows = rows if length <= 65536 else 1
        assert check(kernel, (cut_rows, length), (length, 1), 1, shift).kind is kind


@pytest.mark.parametrize("length", [65537, 66000, 131072 + 1000])
def test_groups_take_the_ends_of_long_rows(kernel: ctypes.CDLL, length: int) -> None:
    assert check(kernel, (11, length), (length, 1), 1).kind is Kind.GROUP_OF_32
    assert check(kernel, (23, length), (length, 1), 1).kind in (Kind.GROUP_OF_8, Kind.GROUP_OF_16)


@pytest.mark.parametrize(("rows", "length"), [(65537, 1), (65537, 3), (65600, 7), (66001, 255)])
def test_shared_leaves(kernel: ctypes.CDLL, rows: int, length: int) -> None:
    assert check(kernel, (rows, length), (length, 1), 1).kind is Kind.GROUP_OF_4


@pytest.mark.parametrize(
    ("shape", "strides", "item"),
    [
        ((3, 5, 300), (2000, 320, 1), 1),
        ((5, 3, 300), (300, 2000, 1), 2),
        ((2, 3, 4, 5, 40), (48, 100000, 4000, 200, 1), 4),
        ((2, 2, 3, 2, 130), (1, 0, 1300, 150, 1), 8),
        ((1, 2, 1, 2, 3, 2, 130), (5, 9000, 1, 1, 1300, 150, 1), 8),
        ((7, 600), (0, 1), 2),
        ((4, 2500), (2600, 1), 4),
        ((2, 4, 9000), (9000, 30000, 1), 1),
        ((3, 70000), (70001, 1), 1),
        ((50, 1, 100), (101, 7, 1), 16),
        ((10, 11), (1, 10), 4),
        ((2, 3, 4, 5), (1, 2, 6, 24), 8),
        ((4,), (3,), 2),
        ((), (), 8),
        ((1, 1, 1), (5, 6, 7), 4),
        ((70, 1), (9, 5), 1),
    ],
)
def test_strides(kernel: ctypes.CDLL, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
    check(kernel, shape, strides, item, shift=item % 16)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Shape, strides, item bytes, shift: a row-contiguous tensor with gaps, in any order of dimensions."""
    item = draw(st.sampled_from([1, 2, 4, 8]))
    outer = draw(st.lists(st.integers(1, 4), max_size=3))
    row = draw(st.one_of(st.integers(1, 64), st.integers(65, 1100), st.integers(1100, 6000))) // item + 1
    order = draw(st.permutations(range(len(outer))))
    strides, step = [0] * len(outer), row + draw(st.integers(0, 20))
    for dim in order:
        strides[dim] = step
        step = step * outer[dim] + draw(st.integers(0, 3))
    return (*outer, row), (*strides, 1), item, item * draw(st.integers(0, 15))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensor=tensors())
def test_any_tensor(kernel: ctypes.CDLL, tensor: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    check(kernel, *tensor)


def test_several_tensors_in_one_launch(kernel: ctypes.CDLL) -> None:
    shapes = [(3, 2100), (1, 9), (90, 700), (9000, 7), (20, 3000), (5, 1024), (1, 4096), (100000, 1)]
    memory = pattern(140_000)
    storage = ctypes.create_string_buffer(memory, len(memory))
    start = ctypes.addressof(storage)
    work = []
    for shape in shapes:
        made = plan("uint8", shape, dense(shape), 1, start, MAX_BLOCKS)
        assert made is not None
        work.append((made, start))
    outs = run(kernel, work, start, start + len(memory))
    for shape, (made, _), out in zip(shapes, work, outs, strict=True):
        expected = memory[: shape[0] * shape[1]]
        assert out == (expected if made.kind is Kind.COPY else plain_digests(expected, shape, 1))
    assert {made.kind for made, _ in work} == set(Kind)


def test_what_must_be_made_contiguous_first() -> None:
    assert plan("float32", (100, 200), (1, 100), 4, 0, 8) is None, "rows are not contiguous"
    assert plan("uint8", (70000, 3), (4, 1), 1, 0, 8) is None, "shared leaves with a gap between rows"
    scattered = (2,) * 7, (2, 10, 50, 250, 1250, 6250, 31250)
    assert plan("float32", (*scattered[0], 100), (*scattered[1], 1), 4, 0, 8) is None, "too many dimensions"
    assert plan("float32", (4, 2000), (2500, 1), 4, 0, 8) is not None
    assert plan("float32", (3, 2, 2, 0, 7), (9, 8, 5, 3, 2), 4, 0, 8) is not None, "no bytes at all"


def test_too_many_leaves() -> None:
    with pytest.raises(ValueError, match="leaves, more than"):
        plan("uint8", (1 << 31, 256), (256, 1), 1, 0, 8)


def test_alignment() -> None:
    def alignment(shape: tuple[int, ...], strides: tuple[int, ...], item: int, address: int) -> int:
        made = plan("x", shape, strides, item, address, 8)
        assert made is not None
        return int(plans.SOURCE.unpack(made.packed)[-1])

    assert alignment((100, 64), (64, 1), 4, 0) == 16
    assert alignment((100, 64), (64, 1), 4, 8) == 8
    assert alignment((100, 64), (66, 1), 4, 0) == 8
    assert alignment((100, 65), (65, 1), 4, 0) == 4
    assert alignment((100, 65), (65, 1), 4, 1) == 4
    assert alignment((1, 5001), (5001, 1), 1, 0) == 16, "one row's stride does not matter"
    assert alignment((70000, 3), (3, 1), 1, 0) == 4
    assert alignment((70000, 4), (4, 1), 1, 0) == 16
