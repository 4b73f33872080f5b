"""Real modules of FlashInfer's, where they are: DETAUDIT_TEST_MODULES names a folder of them.

The folder (searched through) may hold ``fused_moe_90*.so`` (the bf16 CUTLASS MoE module for SM90, 0.7.4) and
objects with one NVFP4 GEMM2 kernel for SM120 each, ``*finalize_sm120a.o`` and ``*none_sm120a.o``.
"""

from __future__ import annotations

import lzma
import os
import shutil
import time
from pathlib import Path

import pytest

from detaudit.core.scans import ScanReport
from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.sources import files_of
from tests.scan.support import plain, tools

FOLDER = os.environ.get("DETAUDIT_TEST_MODULES")
pytestmark = pytest.mark.skipif(not FOLDER, reason="DETAUDIT_TEST_MODULES names no folder of built modules")


def module(pattern: str, folder: Path) -> Path:
    """The first file of that name, unpacked into ``folder`` if it is an .xz; skips the test without one."""
    found = sorted(Path(FOLDER or "").rglob(pattern)) or sorted(Path(FOLDER or "").rglob(f"{pattern}.xz"))
    if not found:
        pytest.skip(f"no {pattern} in DETAUDIT_TEST_MODULES")
    if found[0].suffix != ".xz":
        return found[0]
    path = folder / found[0].stem
    with lzma.open(found[0]) as packed, path.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return path


def scanned(path: Path, cache: Path | None = None) -> ScanReport:
    return scan(plan(files_of([path])), tools(), Settings(cache=cache))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sm90_module_has_36_suspects_all_of_them_finalize(tmp_path: Path) -> None:
    path = module("fused_moe_90*bf16*.so", tmp_path)
    report = scanned(path, tmp_path / "cache")
    assert len(report.kernels) == 563
    assert len(report.suspects) == 36
    assert {kernel.finalize for kernel in report.suspects} == {"FINALIZE"}
    assert sum(kernel.finalize == "FINALIZE" for kernel in report.kernels) == 36
    assert {a.mnemonic for k in report.suspects for a in k.atomics if a.category == "accumulation"} == {
        "REDG.E.ADD.BF16x8.RN.STRONG.GPU"
    }
    begun = time.perf_counter()
    assert scanned(path, tmp_path / "cache") == report
    assert time.perf_counter() - begun < 2


def test_of_the_sm120_objects_finalize_is_a_suspect_and_none_is_not(tmp_path: Path) -> None:
    (fused,) = scanned(module("*finalize_sm120a.o", tmp_path)).kernels
    (unfused,) = scanned(module("*none_sm120a.o", tmp_path)).kernels
    assert (fused.suspect, fused.finalize, plain(fused.arch)) == (True, "FINALIZE", "sm_120")
    assert (unfused.suspect, unfused.finalize, plain(unfused.arch)) == (False, "NONE", "sm_120")
