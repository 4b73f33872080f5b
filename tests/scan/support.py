"""What the scan's tests share: the committed kernels, and the disassembler if it is installed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from detaudit.core.errors import Unsupported
from detaudit.core.scans import KernelScan, ScanReport
from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.tools import Tools, find_tools

FIXTURES = Path(__file__).parent / "fixtures"
KERNELS = FIXTURES / "kernels.fatbin"
PTX_ONLY = FIXTURES / "ptx_only.fatbin"
BARE = FIXTURES / "bare.sm_90.cubin"
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Of the committed kernels, as ``plain`` gives them."""


def tools() -> Tools:
    """The installed disassembler; skips the test where there is none."""
    try:
        return find_tools()
    except Unsupported as error:
        pytest.skip(str(error))


@cache
def fixture_scan() -> ScanReport:
    """The committed kernels, scanned once for all tests."""
    return scan(plan([KERNELS]), tools(), Settings())


def fixture_kernel(name: str, arch: str) -> KernelScan:
    (found,) = [k for k in fixture_scan().kernels if (k.name, plain(k.arch)) == (name, arch)]
    return found


def plain(arch: str) -> str:
    """Without the suffix of ``sm_90a``, which disassemblers before 13.0 leave out."""
    return arch.rstrip("af")
