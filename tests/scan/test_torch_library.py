"""torch's own CUDA library: index_add and index_reduce kernels are suspects exactly where they must be.

Their names say the type and the operation, so that every one can be checked: sums and products of floats
depend on the order, maxima, minima and integers do not. Needs a CUDA build of torch, or a
``libtorch_cuda.so`` in the folder that DETAUDIT_TEST_MODULES names; no GPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from detaudit.core.scans import ScanReport
from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.selection import Selection
from tests.scan.support import tools

LIBRARY = "libtorch_cuda.so"
FLOATS = {"float", "double", "Half", "BFloat16", "complex"}
INTEGERS = {"int", "long", "short", "signed char", "unsigned char", "bool"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def library() -> Path:
    folders = [Path(torch.__file__).parent / "lib"]
    if named := os.environ.get("DETAUDIT_TEST_MODULES"):
        folders.append(Path(named))
    found = next((path for folder in folders for path in folder.rglob(LIBRARY)), None)
    if found is None:
        pytest.skip(f"no {LIBRARY}: torch here is built for the CPU, and DETAUDIT_TEST_MODULES has none")
    return found


def scanned(*globs: str) -> ScanReport:
    return scan(plan([library()]), tools(), Settings(archs=("90",), selection=Selection(globs)))


def test_index_and_scatter_kernels_by_name() -> None:
    report = scanned("*indexFunc*Index*", "*scatter_add_kernel*")
    index = re.compile(r"::indexFunc(?:Small|Large)Index<([\w ]+), .*?(Reduce\w+)")
    checked = set()
    for kernel in report.kernels:
        if (match := index.search(kernel.short)) is None or not match[2].startswith(
            ("ReduceAdd", "ReduceMultiply", "ReduceMaximum", "ReduceMinimum")
        ):
            continue
        dtype, operation = match[1], match[2]
        assert dtype in FLOATS | INTEGERS
        expected = dtype in FLOATS and operation in ("ReduceAdd", "ReduceMultiply")
        assert kernel.suspect == expected, (kernel.short, kernel.atomics)
        checked.add((dtype, operation))
    if not report.kernels:
        pytest.skip("this torch has no code for SM90")
    assert {("float", "ReduceAdd"), ("float", "ReduceMaximum"), ("int", "ReduceAdd")} <= checked
    scatter = [kernel for kernel in report.kernels if "scatter_add_kernel" in kernel.short]
    assert all(kernel.suspect for kernel in scatter)
