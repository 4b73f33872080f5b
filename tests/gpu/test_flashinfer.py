"""FlashInfer's real kernels: what differs, what does not, and that the comparison could have told.

On a machine with prebuilt modules of one weight type, ``MOE_DTYPE`` says which; the tests of the other type
are skipped. Without it both are run, and FlashInfer compiles what it lacks.
"""

from __future__ import annotations

import dataclasses
import os
from functools import cache

import pytest
import torch

from detaudit.core.records import KernelReport, VariantResult
from detaudit.kernels.backend import Available, Options, Unavailable
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import confirm_with
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass
from detaudit.kernels.flashinfer_synthetic import synthetic_case
from detaudit.kernels.flashinfer_tactics import UNTUNED
from detaudit.kernels.flashinfer_variants import sweep_of
from detaudit.kernels.outcomes import exit_code
from detaudit.kernels.shapes import SHAPES, Shape, Synthetic

SHAPE = SHAPES["qwen3-30b-a3b"]
HERE = (9, 0), (0, 7, 4)
"""GPU and FlashInfer release on which the numbers of tactics were measured."""
COUNTS = {"bf16": (81, 36, 45), "fp8": (72, 36, 36)}
"""There: GEMM2 tactics with the fused finalize, of these FINALIZE, and without."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def only(dtype: str) -> pytest.MarkDecorator:
    packed = os.environ.get("MOE_DTYPE", dtype)
    return pytest.mark.skipif(packed != dtype, reason=f"the prebuilt module holds {packed} kernels only")


def case_of(dtype: str, tokens: int = 64, top_k: int = 8) -> Case:
    backend = FlashInferCutlass()
    made = backend.synthetic(Synthetic(dataclasses.replace(SHAPE, top_k=top_k), tokens, dtype))
    if isinstance(made, Unavailable):
        pytest.skip(made.sentence)
    return made


@cache
def swept(dtype: str, tokens: int) -> KernelReport:
    return confirm_with(
        FlashInferCutlass(), case_of(dtype, tokens), runs=20, options=Options(sweeps=("tactics",))
    )


@cache
def compared() -> KernelReport:
    return confirm_with(FlashInferCutlass(), case_of("bf16"), runs=300)


def named(report: KernelReport) -> dict[str, VariantResult]:
    return {variant.name: variant for variant in report.variants}


@only("bf16")
def test_the_control_differs_and_nothing_unfused_does() -> None:
    variants = named(compared())
    assert variants["fused, pinned"].fused is True
    assert variants["fused, pinned"].runs_differing > 150
    assert {name: v.reason for name, v in variants.items() if v.reason} == {}
    for name, variant in variants.items():
        assert variant.runs == 300
        assert (variant.fused is False) == (variant.runs_differing == 0), name
        assert variant.note is None, name
    unfused = [variant for name, variant in variants.items() if name.startswith("unfused")]
    assert len(unfused) == 5
    assert all(variant.fused is False and not variant.can_fuse for variant in unfused)


@only("bf16")
def test_graph_replay_and_dependent_launch_differ_as_well() -> None:
    variants = named(compared())
    for circumstance in ("CUDA graph", "PDL on", "PDL off"):
        assert variants[f"fused, pinned, {circumstance}"].runs_differing > 0, circumstance


@only("bf16")
def test_untuned_it_is_vacuous_and_the_fused_kernel_is_not_recommended() -> None:
    report = compared()
    asked = named(report)[report.asked or ""]
    assert (asked.name, asked.can_fuse, asked.fused, asked.runs_differing) == ("fused", True, False, 0)
    assert report.outcome == "vacuous-control"
    assert exit_code([report]) == 3
    assert report.recommended is not None
    assert report.recommended["settings"]["use_fused_finalize"] is False


@only("bf16")
def test_the_error_against_float64_is_that_of_each_rounding() -> None:
    variants = named(compared())
    assert variants["fused, pinned"].rel_error == pytest.approx(0.0050, rel=0.1)
    assert variants["unfused"].rel_error == pytest.approx(0.0038, rel=0.1)


@only("bf16")
@pytest.mark.parametrize("tokens", [64, 1024])
def test_bf16_tactics_differ_exactly_where_they_finalize(tokens: int) -> None:
    check_sweep("bf16", tokens)


@only("fp8")
@pytest.mark.parametrize("tokens", [64, 1024])
def test_fp8_tactics_differ_exactly_where_they_finalize(tokens: int) -> None:
    check_sweep("fp8", tokens)


def check_sweep(dtype: str, tokens: int) -> None:
    import flashinfer

    report = swept(dtype, tokens)
    fused, unfused = (sweep_of(report.variants, fused=flag) for flag in (True, False))
    assert fused.failed == unfused.failed == {}
    assert fused.differing > 0
    assert fused.differing_is_finalize
    assert (unfused.differing, unfused.finalize) == (0, 0)
    assert fused.stable_digests == unfused.stable_digests == 1
    release = tuple(int(part) for part in flashinfer.__version__.split(".")[:3])
    if (torch.cuda.get_device_capability(), release) == HERE:
        assert (fused.tactics, fused.differing, unfused.tactics) == COUNTS[dtype]


@only("bf16")
@pytest.mark.parametrize("top_k", [1, 2])
def test_one_or_two_experts_are_vacuous(top_k: int) -> None:
    report = confirm_with(FlashInferCutlass(), case_of("bf16", 256, top_k), runs=30)
    control = named(report)["fused, pinned"]
    assert (control.fused, control.runs_differing) == (True, 0)
    assert report.outcome == "vacuous-control"
    assert report.recommended is None


@only("bf16")
def test_three_experts_differ() -> None:
    report = confirm_with(FlashInferCutlass(), case_of("bf16", 256, 3), runs=30)
    assert named(report)["fused, pinned"].runs_differing > 0


@only("bf16")
def test_a_captured_call_is_rerun_with_the_tactics_it_was_tuned_to() -> None:
    from flashinfer.autotuner import AutoTuner, autotune
    from flashinfer.fused_moe import cutlass_fused_moe

    backend, case = FlashInferCutlass(), case_of("bf16")
    before = AutoTuner._instance
    AutoTuner._instance = None
    try:
        assert backend.tactics_in_use(case).gemm2 == UNTUNED
        tensors = {name: t for name, t in case.tensors.items() if "[" not in name}
        with autotune(True):
            cutlass_fused_moe(
                **tensors, output_dtype=torch.bfloat16, quant_scales=[], use_fused_finalize=True
            )
        chosen = backend.tactics_in_use(case)
    finally:
        AutoTuner._instance = before
    assert chosen.gemm2 != UNTUNED
    facts = {"tactics": [chosen.gemm1, chosen.gemm2], "version": backend.library.version, "sm": sm()}
    captured = dataclasses.replace(case, context={**case.context, **facts})
    report = confirm_with(backend, captured, runs=30)
    asked = named(report)["as captured"]
    assert asked.tactic == str(chosen)
    if not asked.fused:
        pytest.skip("void: tuning took an unfused tactic on this machine")
    assert asked.runs_differing > 0
    assert report.outcome == "confirmed"
    assert exit_code([report]) == 1


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0), reason="this GPU has NVFP4"
)
def test_nvfp4_is_unsupported_and_says_what_could_run_it() -> None:
    backend = FlashInferCutlass()
    wanted = Synthetic(Shape("small", 8, 4, 256, 128), 16, "nvfp4")
    refused = backend.synthetic(wanted)
    assert isinstance(refused, Unavailable)
    case = synthetic_case(wanted, torch.device("cuda"))
    report = confirm_with(backend, case, runs=3)
    assert report.outcome == "unsupported"
    for sm_ in (100, 103, 107, 110, 120, 121):
        assert f"SM{sm_}" in report.outcome_reason


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0), reason="needs NVFP4"
)
def test_nvfp4_on_blackwell() -> None:
    case = case_of("nvfp4")
    assert isinstance(FlashInferCutlass().availability(case), Available)
    variants = named(confirm_with(FlashInferCutlass(), case, runs=100))
    assert variants["fused, pinned"].runs_differing > 0
    assert variants["unfused"].runs_differing == 0


def sm() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
