"""Kernels with one thing each that can, or cannot, make an order visible: real machine code of four GPUs."""

from __future__ import annotations

import re

import pytest

from detaudit.core.scans import MEANINGS
from tests.scan.support import ARCHS, FIXTURES, fixture_kernel, fixture_scan, plain

SUSPECT, UNKNOWN, TICKET, NOTHING = MEANINGS
SINCE_SM90 = ARCHS[1:]

EVERYWHERE = {
    "float_atomic": (SUSPECT, {("accumulation", "add", "f32", "global", False)}),
    "float_atomic_returned": (SUSPECT, {("accumulation", "add", "f32", "global", False)}),
    "double_atomic": (SUSPECT, {("accumulation", "add", "f64", "global", False)}),
    "half2_atomic": (
        SUSPECT,
        {("accumulation", "add", "f16x2", "generic", False), ("accumulation", "add", "f16", "shared", True)},
    ),
    "shared_float_atomic": (SUSPECT, {("accumulation", "add", "f32", "shared", True)}),
    "shared_double_atomic": (SUSPECT, {("accumulation", "add", "f64", "shared", True)}),
    "shared_half2_atomic": (
        SUSPECT,
        {("accumulation", "add", "f16x2", "generic", False), ("accumulation", "add", "f16", "shared", True)},
    ),
    "float_product_loop": (SUSPECT, {("accumulation", "mul", "f32", "global", True)}),
    "ticket_order": (TICKET, {("ticket", "add", "u32", "global", False)}),
    "shared_ticket_order": (TICKET, {("ticket", "add", "u32", "shared", False)}),
    "counter": (NOTHING, {("counter", "add", "u32", "global", False)}),
    "shared_counter": (NOTHING, {("counter", "add", "u32", "shared", False)}),
    "integer_maximum": (NOTHING, {("counter", "max", "s32", "global", False)}),
    "spin_lock": (
        NOTHING,
        {("flag", "cas", "b32", "global", False), ("flag", "exch", "b32", "global", False)},
    ),
    "shared_spin_lock": (
        NOTHING,
        {("flag", "cas", "b32", "shared", False), ("flag", "exch", "b32", "shared", False)},
    ),
    "float_maximum_loop": (NOTHING, {("flag", "cas", "b32", "global", False)}),
    "none": (NOTHING, set()),
    "ordered_sum": (NOTHING, set()),
}
"""Kernel to meaning and to (category, operation, type, scope, loop) of its atomics, on all four GPUs."""

ON_SM90_AND_LATER = {
    "bulk_reduce_float": (SUSPECT, {("accumulation", "add", "f32", "bulk", False)}),
    "bulk_reduce_bf16": (SUSPECT, {("accumulation", "add", "bf16", "bulk", False)}),
    "bulk_reduce_integer": (NOTHING, {("counter", "add", "u32", "bulk", False)}),
    "tensor_reduce": (SUSPECT, {("accumulation", "add", "in tensor map", "bulk", False)}),
    "vector_reduce": (SUSPECT, {("accumulation", "add", "f32x4", "global", False)}),
    "cluster_float_atomic": (
        SUSPECT,
        {
            ("accumulation", "add", "f32", "cluster", False),
            ("accumulation", "add", "f32", "generic", True),
            ("accumulation", "add", "f32", "shared", True),
        },
    ),
    "cluster_counter": (NOTHING, {("counter", "add", "u32", "cluster", False)}),
    "barrier_only": (NOTHING, {("barrier", "arrive", "b64", "shared", False)}),
    "multicast_load_reduce": (SUSPECT, {("accumulation", "add", "f32", "multicast", False)}),
    # The opcode is that of any reduction: that the address is a multicast one cannot be seen.
    "multicast_reduce": (SUSPECT, {("accumulation", "add", "f32", "global", False)}),
}
BF16_BEFORE_SM90 = {
    # No instruction for it yet, hence loops.
    "bf16x2_atomic": {("accumulation", "add", "bf16", "global", True)},
    "bf16_atomic": {("accumulation", "add", "bf16", "global", True)},
}
BF16_SINCE_SM90 = {
    "bf16x2_atomic": {
        ("accumulation", "add", "bf16x2", "generic", False),
        ("accumulation", "add", "bf16", "shared", True),
    },
    "bf16_atomic": {("accumulation", "add", "bf16", "generic", True)},
}
CASES = [
    *((name, arch, *expected) for name, expected in EVERYWHERE.items() for arch in ARCHS),
    *((name, arch, *expected) for name, expected in ON_SM90_AND_LATER.items() for arch in SINCE_SM90),
    *((name, "sm_80", SUSPECT, atomics) for name, atomics in BF16_BEFORE_SM90.items()),
    *((name, arch, SUSPECT, atomics) for name, atomics in BF16_SINCE_SM90.items() for arch in SINCE_SM90),
]


@pytest.mark.parametrize(("name", "arch", "meaning", "atomics"), CASES)
def test_each_kernel_is_read_right(
    name: str, arch: str, meaning: str, atomics: set[tuple[str, str, str, str, bool]]
) -> None:
    kernel = fixture_kernel(name, arch)
    found = {(a.category, a.operation, a.dtype, a.scope, a.loop) for a in kernel.atomics}
    assert (kernel.meaning, found) == (meaning, atomics)
    assert kernel.entry


def test_every_kernel_of_the_source_is_expected_and_found() -> None:
    source = (FIXTURES / "kernels.cu").read_text(encoding="utf-8")
    written = set(re.findall(r"^KERNEL (?:__cluster_dims__\(.*?\) )?(\w+)\(", source, re.MULTILINE))
    found = {(kernel.name, plain(kernel.arch)) for kernel in fixture_scan().kernels}
    assert {(name, arch) for name, arch, _, _ in CASES} == found
    assert {name for name, _ in found} == written


def test_a_returned_value_is_told_apart() -> None:
    for arch in ARCHS:
        assert [atomic.returned for atomic in fixture_kernel("float_atomic_returned", arch).atomics] == [True]
        assert [atomic.returned for atomic in fixture_kernel("float_atomic", arch).atomics] == [False]
