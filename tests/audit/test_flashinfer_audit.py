"""Whole audits of a model that calls FlashInfer's MoE: its own Python, over a made-up compiled module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from detaudit.auditing import audit
from detaudit.core.options import Options
from detaudit.core.records import KernelReport, Report, VariantResult
from detaudit.kernels.cases import Case
from detaudit.target import resolve
from tests.kernels.flashinfer_sm90 import FASTEST, Machine, compiled

pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)

MODEL = """
import torch
from torch import nn
from flashinfer.autotuner import autotune
from flashinfer.fused_moe import cutlass_fused_moe
from tests.kernels.flashinfer_sm90 import tiny_case

TOKENS = 8

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.made = tiny_case(TOKENS).tensors
    def forward(self, x):
        _, *rest = self.made.values()
        return cutlass_fused_moe(x, *rest, torch.bfloat16, [], use_fused_finalize={fused})[0]

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()
    def forward(self, x):
        return x + self.experts(x)

def build_model():
    model = nn.Sequential(Layer(), Layer())
    if {tuned}:
        with torch.no_grad(), autotune(True, tuning_buckets=(TOKENS,)):
            model(make_inputs())
    return model

def make_inputs():
    return tiny_case(TOKENS).tensors["input"].clone()
"""


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with compiled(Machine()):
        yield


def audited(folder: Path, *, fused: bool, tuned: bool, capture_bytes: int = 1 << 30) -> Report:
    path = folder / "model.py"
    path.write_text(MODEL.format(fused=fused, tuned=tuned))
    options = Options(runs=3, history=False, observer=False, kernel_runs=6, capture_bytes=capture_bytes)
    return audit(resolve(str(path), script=False, argv=()), options, folder / "t.detaudit")


def named(kernel: KernelReport) -> dict[str, VariantResult]:
    return {variant.name: variant for variant in kernel.variants}


def test_tuned_the_origin_is_rerun_with_the_tactics_of_the_model(tmp_path: Path) -> None:
    report = audited(tmp_path, fused=True, tuned=True)
    assert (report.verdict, report.origins[0].module) == ("nondeterministic", "0.experts")
    (kernel,) = report.kernels
    assert (kernel.outcome, kernel.asked) == ("confirmed", "as captured")
    assert named(kernel)["as captured"].tactic == f"gemm1 0, gemm2 {FASTEST}"
    assert named(kernel)["as captured"].runs_differing > 0
    assert "fused-not-run" not in {finding.kind for finding in report.findings}
    (saved,) = tmp_path.glob("t.detaudit.d/case-*")
    context = Case.load(saved).context
    assert context["tactics"] == [0, FASTEST]
    assert context["autotuner"]["tactics"]
    assert (context["sm"], context["deterministic_algorithms"]) == (90, False)


def test_untuned_the_fused_kernel_did_not_run(tmp_path: Path) -> None:
    report = audited(tmp_path, fused=True, tuned=False)
    assert (report.verdict, report.exit_code) == ("deterministic", 0)
    (finding,) = report.findings
    assert (finding.kind, finding.module) == ("fused-not-run", "0.experts")
    (kernel,) = report.kernels
    assert (kernel.outcome, kernel.asked) == ("vacuous-control", "fused")


def test_unfused_it_is_stable_and_shown_to_be(tmp_path: Path) -> None:
    report = audited(tmp_path, fused=False, tuned=True)
    assert (report.verdict, report.findings) == ("deterministic", ())
    (kernel,) = report.kernels
    assert (kernel.outcome, kernel.asked) == ("confirmed", "as captured")
    assert named(kernel)["as captured"].can_fuse is False


def test_a_call_too_large_to_keep_is_named(tmp_path: Path) -> None:
    report = audited(tmp_path, fused=True, tuned=True, capture_bytes=1000)
    (kernel,) = report.kernels
    assert kernel.outcome == "unsupported"
    assert "--capture-bytes" in kernel.outcome_reason
