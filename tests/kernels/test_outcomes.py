from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from detaudit.core.errors import EXIT_INCONCLUSIVE, EXIT_NONDETERMINISTIC, EXIT_STABLE
from detaudit.core.records import KernelReport, Outcome, VariantResult
from detaudit.kernels.backend import Unavailable
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import BACKENDS, all_backends, backend_named, confirm, confirm_with
from detaudit.kernels.outcomes import decide, exit_code
from detaudit.kernels.reference_backend import ENTRY, ReferenceBackend
from detaudit.kernels.shapes import Shape, Synthetic
from tests.kernels.fakes import (
    FakeBackend,
    FakeVariant,
    candidate,
    control,
    failing,
    fake_case,
    racy,
    reads_its_output,
    stable,
)


def result(name: str, differing: int = 0, runs: int = 300, **fields: Any) -> VariantResult:
    base = VariantResult(
        name=name,
        settings={},
        tactic="gemm2 63",
        runs=runs,
        runs_differing=differing,
        distinct=1 + differing,
        bound=0.00994,
        max_ulp=0,
        max_abs=0.0,
        rel_error=None,
        median_ms=1.0,
        ratio=1.0,
        fused=False,
        can_fuse=False,
    )
    return dataclasses.replace(base, **fields)


RACY = result("pinned", 300, fused=True, can_fuse=True)
QUIET = result("pinned", 0, fused=True, can_fuse=True)
UNFUSED = result("unfused")
FAILED: dict[str, Any] = {"runs": 0, "reason": "RuntimeError: no"}


@pytest.mark.parametrize(
    ("given", "outcome", "words"),
    [
        ({"unavailable": "SM90 has no NVFP4; it runs on SM100"}, "unsupported", "SM100"),
        ({"cannot_differ": "top_k is 2"}, "vacuous-control", "top_k is 2"),
        ({"cannot_differ": "top_k is 2", "controls": [RACY]}, "vacuous-control", "top_k is 2"),
        ({}, "confirmed", "pinned differs in 300 of 300 runs, unfused in 0 of 300"),
        ({"controls": [result("pinned", 9, fused=None)]}, "confirmed", "9 of 300"),
        (
            {"controls": [result("pinned", 1, fused=None)]},
            "vacuous-control",
            "unfused in 0 of 300 can be chance",
        ),
        ({"candidates": [result("unfused", runs=1)]}, "confirmed", "0 of 1 "),
        (
            {"controls": [result("pinned", 9, fused=None)], "candidates": [result("few", runs=30), UNFUSED]},
            "confirmed",
            "9 of 300 runs, unfused in 0 of 300",
        ),
        ({"controls": [QUIET, RACY]}, "confirmed", "300 of 300"),
        ({"controls": [result("a", **FAILED), RACY]}, "confirmed", "300 of 300"),
        ({"candidates": [result("racy", 9), UNFUSED]}, "confirmed", "unfused"),
        ({"controls": [QUIET]}, "not-reproduced", "300 times and did not differ"),
        ({"controls": [QUIET], "candidates": [result("racy", 9)]}, "not-reproduced", "did not differ"),
        ({"controls": [result("pinned", 0, fused=False)]}, "vacuous-control", "did not run in pinned"),
        ({"controls": [result("pinned", 7, fused=False)]}, "vacuous-control", "did not run in pinned"),
        ({"controls": [result("pinned", 0, fused=None)]}, "vacuous-control", "cannot be shown"),
        ({"controls": []}, "vacuous-control", "no positive control ran"),
        ({"controls": [result("pinned", **FAILED)]}, "vacuous-control", "pinned: RuntimeError: no"),
        (
            {"controls": [result("pinned", **FAILED)], "candidates": [result("unfused", **FAILED)]},
            "unsupported",
            "no variant ran; pinned: RuntimeError: no",
        ),
        ({"candidates": [result("unfused", 4)]}, "vacuous-control", "so does unfused"),
        ({"candidates": []}, "vacuous-control", "no candidate"),
        ({"candidates": [result("fused", can_fuse=True)]}, "vacuous-control", "no candidate"),
        (
            {"candidates": [result("unfused", runs=12, reason="RuntimeError after 12 runs")]},
            "vacuous-control",
            "unfused did not run to the end",
        ),
        (
            {"asked": result("default", can_fuse=True, fused=False)},
            "vacuous-control",
            "may take the fused kernel and did not",
        ),
        ({"asked": result("default", 300, can_fuse=True, fused=True)}, "confirmed", "unfused"),
        ({"asked": UNFUSED}, "confirmed", "unfused"),
    ],
)
def test_decide(given: dict[str, Any], outcome: Outcome, words: str) -> None:
    decision = decide(**{"controls": [RACY], "candidates": [UNFUSED], **given})
    assert decision.outcome == outcome
    assert words in decision.reason
    assert "\n" not in decision.reason


def test_what_is_stable_may_be_recommended_only_if_the_control_differed() -> None:
    untuned = result("default", can_fuse=True, fused=False)
    assert decide(controls=[RACY], candidates=[UNFUSED], asked=untuned).stable == (UNFUSED,)
    assert decide(controls=[QUIET], candidates=[UNFUSED]).stable == ()
    assert decide(controls=[RACY], candidates=[UNFUSED, untuned]).stable == (UNFUSED,)


DEFAULT_UNTUNED = FakeVariant("default", stable, "listed", can_fuse=True, fused=False, asked=True)
DEFAULT_TUNED = FakeVariant("default", racy, "listed", can_fuse=True, fused=True, asked=True)


@pytest.mark.parametrize(
    ("fakes", "outcome", "recommended", "code"),
    [
        ([control(racy, asked=True), candidate(stable)], "confirmed", "unfused", 1),
        ([DEFAULT_TUNED, control(racy), candidate(stable)], "confirmed", "unfused", 1),
        ([control(racy), candidate(stable, asked=True)], "confirmed", "unfused", 0),
        ([control(stable, asked=True), candidate(stable)], "not-reproduced", None, 3),
        ([control(stable, fused=False, asked=True), candidate(stable)], "vacuous-control", None, 3),
        ([DEFAULT_UNTUNED, control(racy), candidate(stable)], "vacuous-control", "unfused", 3),
        ([control(racy, asked=True), candidate(racy)], "vacuous-control", None, 1),
        ([control(racy, asked=True), candidate(failing(5))], "vacuous-control", None, 1),
        ([control(failing(0)), candidate(stable, asked=True)], "vacuous-control", None, 3),
        ([control(failing(0)), candidate(failing(0), asked=True)], "unsupported", None, 3),
        ([control(racy, asked=True), candidate(reads_its_output)], "vacuous-control", None, 1),
        (
            [control(racy, asked=True), candidate(reads_its_output), candidate(stable, "other")],
            "confirmed",
            "other",
            1,
        ),
    ],
)
def test_outcomes_of_kernels_that_behave_as_told(
    fakes: list[FakeVariant], outcome: Outcome, recommended: str | None, code: int
) -> None:
    (report,) = confirm([fake_case()], runs=12, backends=[FakeBackend(fakes)])
    assert report.outcome == outcome
    assert (report.recommended or {}).get("variant") == recommended
    assert report.asked == next(fake.name for fake in fakes if fake.asked)
    assert (report.case, report.module, report.backend) == ("case", "layers.0.mlp.experts", "fake")
    assert [variant.name for variant in report.variants] == [fake.name for fake in fakes]
    assert exit_code([report]) == code


def test_a_case_that_could_not_differ_is_vacuous_however_the_kernel_behaves() -> None:
    backend = FakeBackend([control(racy), candidate(stable)], cannot="top_k is 2")
    (report,) = confirm([fake_case()], runs=6, backends=[backend])
    assert (report.outcome, report.recommended) == ("vacuous-control", None)


def test_an_unsupported_case_runs_nothing_and_names_what_could() -> None:
    backend = FakeBackend(
        [control(racy)], unavailable=Unavailable("this machine has no GPU", "SM100 and SM120")
    )
    (report,) = confirm([fake_case()], backends=[backend])
    assert report.outcome == "unsupported"
    assert report.outcome_reason == "this machine has no GPU; it runs on SM100 and SM120"
    assert report.variants == ()
    assert backend.log == []
    assert exit_code([report]) == EXIT_INCONCLUSIVE


def test_a_foreign_case_is_never_handed_to_another_backend() -> None:
    foreign = Case("case", "somewhere.else:kernel", {}, {})
    (report,) = confirm([foreign], backends=[FakeBackend([control(racy)]), ReferenceBackend()])
    assert (report.outcome, report.backend) == ("unsupported", "none")
    assert "somewhere.else:kernel" in report.outcome_reason


def test_running_out_of_memory_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(FakeBackend, "variants", full)
    report = confirm_with(FakeBackend([control(racy)]), fake_case())
    assert report.outcome == "unsupported"
    assert "out of memory. Tried" in report.outcome_reason


def report_of(code: int) -> KernelReport:
    asked = {
        EXIT_STABLE: result("asked"),
        EXIT_NONDETERMINISTIC: result("asked", 1),
        EXIT_INCONCLUSIVE: result("asked", can_fuse=True),
    }[code]
    return KernelReport("case", None, "fake", "confirmed", "", None, (asked,), "pinned", "asked")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0], 0), ([0, 0], 0), ([0, 3], 3), ([3, 1, 0], 1), ([1], 1), ([], 3)],
)
def test_the_worst_case_decides_the_exit_code(codes: list[int], expected: int) -> None:
    assert exit_code(map(report_of, codes)) == expected


def test_a_default_that_may_fuse_and_did_not_differ_is_not_called_stable() -> None:
    lucky = FakeVariant("default", stable, "listed", can_fuse=True, fused=None, asked=True)
    (report,) = confirm(
        [fake_case()], runs=6, backends=[FakeBackend([lucky, control(racy), candidate(stable)])]
    )
    assert report.outcome == "confirmed"
    assert exit_code([report]) == EXIT_INCONCLUSIVE


def test_backends_are_found_by_name() -> None:
    assert "reference" in {backend.name for backend in all_backends()}
    assert all(backend_named(backend.name).name == backend.name for backend in all_backends())
    assert set(BACKENDS) >= {backend.name for backend in all_backends()}


# From here on the kernel is real: the reference, with CPU threads that race for the rows.

SHAPE = Shape("small", experts=8, top_k=4, hidden=512, intermediate=32)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def reference_case(top_k: int, finalize: str) -> Case:
    shape = dataclasses.replace(SHAPE, top_k=top_k)
    case = ReferenceBackend().synthetic(Synthetic(shape, tokens=256, dtype="nvfp4"))
    assert isinstance(case, Case)
    return dataclasses.replace(case, parameters={**case.parameters, "finalize": finalize})


@pytest.mark.parametrize(("finalize", "code"), [("atomic", 1), ("ordered", 0)])
def test_the_reference_is_confirmed_by_a_real_race(threads: int, finalize: str, code: int) -> None:
    (report,) = confirm([reference_case(4, finalize)], runs=40)
    by_name = {variant.name: variant for variant in report.variants}
    if not by_name["atomic"].runs_differing:
        pytest.skip("void: the atomic finalize did not vary on this machine, so nothing can be shown")
    assert (report.backend, report.outcome, report.control) == ("reference", "confirmed", "atomic")
    assert report.asked == finalize == report.variants[0].name
    assert by_name["ordered"].runs_differing == 0
    assert by_name["atomic"].distinct > 1
    assert by_name["atomic"].max_ulp
    assert by_name["ordered"].rel_error is not None
    assert by_name["ordered"].rel_error < 0.1
    assert report.recommended is not None
    assert report.recommended["settings"] == {"finalize": "ordered"}
    assert exit_code([report]) == code


def test_the_reference_with_two_experts_per_token_is_vacuous(threads: int) -> None:
    (report,) = confirm([reference_case(2, "atomic")], runs=20)
    assert report.outcome == "vacuous-control"
    assert "top_k is 2" in report.outcome_reason
    assert {variant.runs_differing for variant in report.variants} == {0}
    assert report.recommended is None


def test_the_reference_on_one_thread_or_few_terms_cannot_differ(threads: int) -> None:
    backend = ReferenceBackend()
    case = reference_case(4, "atomic")
    assert backend.cannot_differ(case) is None
    few = {**case.tensors, "x": case.tensors["x"][:8]}
    assert "one thread" in str(backend.cannot_differ(dataclasses.replace(case, tensors=few)))
    torch.set_num_threads(1)
    assert "one CPU thread" in str(backend.cannot_differ(case))


def test_a_reference_case_without_its_tensors_is_unsupported() -> None:
    (report,) = confirm([Case("case", ENTRY, {"x": torch.ones(2, 2)}, {})])
    assert (report.backend, report.outcome) == ("reference", "unsupported")
    assert "has no token_selected_experts" in report.outcome_reason


def as_flashinfer(case: Case) -> Case:
    """The same call in FlashInfer's argument names and views (six quantization scales)."""
    t = case.tensors
    scales = [
        t["a1_global"],
        t["fc1_scale"].view(torch.int32),
        1.0 / (t["a1_global"] * t["fc1_global"]),
        t["a2_global"],
        t["fc2_scale"].view(torch.int32),
        1.0 / (t["a2_global"] * t["fc2_global"]),
    ]
    tensors = {
        "input": t["x"],
        "token_selected_experts": t["token_selected_experts"],
        "token_final_scales": t["token_final_scales"],
        "fc1_expert_weights": t["fc1_weight"].view(torch.int64),
        "fc2_expert_weights": t["fc2_weight"].view(torch.int64),
        **{f"quant_scales[{i}]": scale for i, scale in enumerate(scales)},
    }
    return Case("flashinfer", "flashinfer.fused_moe:cutlass_fused_moe", tensors, {"output_dtype": "bfloat16"})


def test_a_flashinfer_case_runs_on_the_reference_only_by_name() -> None:
    own = reference_case(4, "ordered")
    foreign = as_flashinfer(own)
    (report,) = confirm([foreign], backends=[ReferenceBackend()])
    assert report.outcome == "unsupported"
    named = confirm_with(ReferenceBackend(), foreign, runs=2)
    expected = confirm_with(ReferenceBackend(), own, runs=2)
    assert named.backend == "reference"
    errors = [{v.name: v.rel_error for v in report.variants}["ordered"] for report in (named, expected)]
    # The weights' global scales are recovered by a division, so the last bits may differ.
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_a_flashinfer_case_in_another_format_is_refused_by_the_reference() -> None:
    bf16 = Case("bf16", "flashinfer.fused_moe:cutlass_fused_moe", {"input": torch.ones(2, 2)}, {})
    report = confirm_with(ReferenceBackend(), bf16)
    assert report.outcome == "unsupported"
    assert "plain NVFP4 SwiGLU" in report.outcome_reason
