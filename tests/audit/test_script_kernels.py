"""A script's kernel calls are confirmed too, from a run in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.harness import run_audit

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import nvfp4_moe
import torch
model = nvfp4_moe.build_model()
with torch.no_grad():
    model(nvfp4_moe.make_inputs())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("racy")
def test_the_kernel_of_a_script_is_rerun(tmp_path: Path) -> None:
    report = run_audit(tmp_path, SCRIPT, prelude="", runs=3, observer=False, confirm=True, kernel_runs=12)
    origin = report.origins[0]
    assert origin.module.endswith(".mlp.experts")  # of three runs, those of the first layer may agree
    assert origin.max_ulp, origin.numbers_reason
    (kernel,) = report.kernels
    assert kernel.module in {found.module for found in report.origins}
    assert (kernel.backend, kernel.outcome) == ("reference", "confirmed")
    assert [path.name for path in tmp_path.glob("*.detaudit.d/case-*")]
