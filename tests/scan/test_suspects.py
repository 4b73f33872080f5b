"""Suspects in a lock file, and those that are new against it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from detaudit.core.errors import TraceUnreadable
from detaudit.core.scans import Atomic, KernelScan, ScanReport
from detaudit.scan.suspects import lock_suspects, new_suspects

ADD = Atomic("accumulation", "add", "bf16x8", "global", False, False, "REDG.E.ADD.BF16x8.RN.STRONG.GPU")
SHARED = Atomic("accumulation", "add", "f32", "shared", False, True, "ATOMS.CAST.SPIN")
TICKET = Atomic("ticket", "add", "u32", "global", True, False, "ATOMG.E.ADD.STRONG.GPU")


def kernel(name: str, *atomics: Atomic, arch: str = "sm_90a", file: str = "a.so") -> KernelScan:
    return KernelScan(name, name, arch, file, True, atomics)


def lock(*kernels: KernelScan) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps({"suspects": lock_suspects(ScanReport(kernels))}))
    return kept


def new(scan: ScanReport, kept: dict[str, Any]) -> list[str]:
    return [kernel.name for kernel in new_suspects(scan, kept)]


def test_the_same_scan_has_nothing_new_wherever_the_files_are() -> None:
    kernels = (kernel("b", ADD), kernel("a", ADD, TICKET), kernel("quiet", TICKET))
    moved = tuple(dataclasses.replace(k, file="/elsewhere/b.so", copies=3) for k in kernels)
    assert new(ScanReport(moved), lock(*kernels)) == []


def test_a_lock_is_sorted_and_holds_suspects_only() -> None:
    assert lock(kernel("b", SHARED, ADD), kernel("a", ADD), kernel("quiet", TICKET))["suspects"] == [
        {"kernel": "a", "arch": "sm_90", "accumulates": ["add.bf16x8 global"], "short": "a"},
        {
            "kernel": "b",
            "arch": "sm_90",
            "accumulates": ["add.bf16x8 global", "add.f32 shared"],
            "short": "b",
        },
    ]


def test_a_new_kernel_a_new_way_and_a_new_architecture_are_new() -> None:
    kept = lock(kernel("a", ADD), kernel("b", ADD, SHARED))
    assert new(ScanReport((kernel("c", ADD),)), kept) == ["c"]
    assert new(ScanReport((kernel("a", ADD, SHARED),)), kept) == ["a"]
    assert new(ScanReport((kernel("a", ADD, arch="sm_120a"),)), kept) == ["a"]


def test_the_suffix_that_older_disassemblers_leave_out_makes_nothing_new() -> None:
    assert new(ScanReport((kernel("a", ADD, arch="sm_90"),)), lock(kernel("a", ADD, arch="sm_90a"))) == []


def test_fewer_ways_and_fewer_suspects_are_not_new() -> None:
    kept = lock(kernel("a", ADD), kernel("b", ADD, SHARED))
    assert new(ScanReport((kernel("b", ADD),)), kept) == []
    assert new(ScanReport(()), kept) == []


def test_a_suspect_in_two_files_is_told_once() -> None:
    assert new(ScanReport((kernel("c", ADD), kernel("c", ADD, file="b.so"))), lock()) == ["c"]


def test_the_json_of_a_scan_serves_as_a_lock() -> None:
    scan = ScanReport((kernel("a", ADD), kernel("b", TICKET)))
    assert new(scan, scan.to_json()) == []
    assert new(ScanReport((*scan.kernels, kernel("c", ADD))), scan.to_json()) == ["c"]


@pytest.mark.parametrize(
    "damaged", [{}, {"suspects": "a"}, {"suspects": [{}]}, {"suspects": [1]}, {"suspects": None}]
)
def test_a_lock_that_cannot_be_read(damaged: dict[str, Any]) -> None:
    with pytest.raises(TraceUnreadable):
        new_suspects(ScanReport(()), damaged)
