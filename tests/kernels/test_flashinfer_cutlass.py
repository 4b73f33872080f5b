"""The backend over FlashInfer's own Python, with a compiled module that is made up (see flashinfer_sm90)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from detaudit.core.errors import Unsupported
from detaudit.core.records import KernelReport, VariantResult
from detaudit.kernels import flashinfer_call as call
from detaudit.kernels import flashinfer_cutlass, flashinfer_graph
from detaudit.kernels.backend import Available, Options, Unavailable
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import confirm_with
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass
from detaudit.kernels.flashinfer_synthetic import synthetic_case
from detaudit.kernels.flashinfer_tactics import Tactics
from detaudit.kernels.flashinfer_variants import Plan, sweep_of, variants_of
from detaudit.kernels.outcomes import exit_code
from detaudit.kernels.shapes import Synthetic
from tests.kernels.flashinfer_sm90 import (
    FASTEST,
    FIRST_FUSED,
    FUSED,
    GEMM1,
    SHAPE,
    UNFUSED,
    Machine,
    compiled,
    tiny_case,
)

pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)

RUNS = 8


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def backend(machine: Machine) -> Iterator[FlashInferCutlass]:
    with compiled(machine) as found:
        yield found


def named(report: KernelReport) -> dict[str, VariantResult]:
    return {variant.name: variant for variant in report.variants}


def captured(case: Case, backend: FlashInferCutlass, **context: Any) -> Case:
    facts = {"version": backend.library.version, "sm": 90, **context}
    return dataclasses.replace(case, context={**case.context, **facts})


def launch(case: Case, **changes: Any) -> None:
    """The model's own call, with nothing of ours around it."""
    from flashinfer.fused_moe import cutlass_fused_moe

    tensors = {name: tensor for name, tensor in case.tensors.items() if "[" not in name}
    arguments = {"output_dtype": torch.bfloat16, "quant_scales": [], "use_fused_finalize": True, **changes}
    cutlass_fused_moe(**tensors, **arguments)


def test_untuned_the_fused_kernel_does_not_run_and_nothing_was_shown(backend: FlashInferCutlass) -> None:
    report = confirm_with(backend, tiny_case(), runs=RUNS)
    variants = named(report)
    assert report.asked == "fused"
    assert (variants["fused"].fused, variants["fused"].can_fuse) == (False, True)
    assert variants["fused, pinned"].runs_differing > 0
    assert report.outcome == "vacuous-control"
    assert exit_code([report]) == 3
    assert report.recommended is not None
    assert report.recommended["settings"]["use_fused_finalize"] is False


def test_tuned_it_differs_and_unfused_is_confirmed(backend: FlashInferCutlass) -> None:
    case = captured(tiny_case(), backend, tactics=[0, FASTEST])
    report = confirm_with(backend, case, runs=RUNS)
    variants = named(report)
    assert report.asked == "as captured"
    assert variants["as captured"].tactic == f"gemm1 0, gemm2 {FASTEST}"
    assert variants["as captured"].runs_differing > 0
    assert variants["fused, autotuned"].tactic == f"gemm1 0, gemm2 {FASTEST}"
    assert report.outcome == "confirmed"
    assert exit_code([report]) == 1
    assert all(v.can_fuse is False for name, v in variants.items() if name.startswith("unfused"))


def test_an_unfused_case_is_stable_and_says_so(backend: FlashInferCutlass) -> None:
    case = tiny_case()
    case = dataclasses.replace(case, parameters={**case.parameters, "use_fused_finalize": False})
    report = confirm_with(backend, case, runs=RUNS)
    assert (report.asked, report.outcome, exit_code([report])) == ("unfused", "confirmed", 0)


def test_the_control_is_the_first_tactic_proven_to_finalize(backend: FlashInferCutlass) -> None:
    report = confirm_with(backend, tiny_case(), runs=1)
    assert named(report)["fused, pinned"].tactic == f"gemm1 first, gemm2 {FIRST_FUSED}"


def test_without_kernel_names_behaviour_is_the_proof(
    backend: FlashInferCutlass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_graph, "kernel_names", lambda _work: [])
    variants = named(confirm_with(backend, tiny_case(), runs=2))
    assert variants["fused, pinned"].tactic == f"gemm1 first, gemm2 {FIRST_FUSED}"
    assert variants["fused, pinned"].fused is True
    assert variants["fused"].fused is False


def test_a_sweep_runs_every_tactic_of_either_runner(backend: FlashInferCutlass) -> None:
    report = confirm_with(backend, tiny_case(), runs=RUNS, options=Options(sweeps=("tactics",)))
    fused, unfused = (sweep_of(report.variants, fused=flag) for flag in (True, False))
    assert (fused.tactics, fused.differing, fused.finalize) == (len(FUSED), 2, 2)
    assert (unfused.tactics, unfused.differing, unfused.finalize) == (len(UNFUSED), 0, 0)
    assert fused.differing_is_finalize
    assert fused.stable_digests == unfused.stable_digests == 1
    assert fused.failed == unfused.failed == {}


def test_top_k_two_cannot_differ(backend: FlashInferCutlass) -> None:
    case = tiny_case(shape=dataclasses.replace(SHAPE, top_k=2))
    report = confirm_with(backend, case, runs=2)
    assert report.outcome == "vacuous-control"
    assert "top_k is 2" in report.outcome_reason
    assert report.recommended is None


def test_a_module_without_fused_tactics_shows_nothing() -> None:
    with compiled(Machine(fuses=False)) as backend:
        report = confirm_with(backend, tiny_case(), runs=2)
    assert report.outcome == "vacuous-control"
    assert "no tactic fuses the finalize" in report.outcome_reason
    assert not any(variant.can_fuse for variant in report.variants)
    assert "fused, pinned" not in named(report)


def test_the_tactics_in_use_are_those_of_the_live_cache(backend: FlashInferCutlass, machine: Machine) -> None:
    from flashinfer.autotuner import autotune

    case = tiny_case(tokens=8)
    assert backend.tactics_in_use(case) == Tactics()
    with autotune(True, tuning_buckets=(8,)):
        launch(case)
    launched = len(machine.launched)
    assert backend.tactics_in_use(case) == Tactics(0, FASTEST)
    assert len(machine.launched) == launched, "asking launches nothing"


def test_tuning_a_variant_leaves_the_cache_of_the_process_alone(backend: FlashInferCutlass) -> None:
    from flashinfer.autotuner import AutoTuner

    case = tiny_case(tokens=8)
    assert backend.tactics_in_use(case) == Tactics()
    before = AutoTuner._instance
    variants = named(confirm_with(backend, case, runs=2))
    assert variants["fused, autotuned"].tactic == f"gemm1 0, gemm2 {FASTEST}"
    assert AutoTuner._instance is before
    assert before is not None
    assert not before.profiling_cache
    assert backend.tactics_in_use(case) == Tactics()


def test_variants_are_run_whatever_the_process_is_tuned_to(backend: FlashInferCutlass) -> None:
    from flashinfer.autotuner import autotune

    case = tiny_case(tokens=8)
    with autotune(True, tuning_buckets=(8,)):
        launch(case)
    variants = named(confirm_with(backend, case, runs=2))
    assert variants["fused"].tactic == "gemm1 first, gemm2 first"
    assert variants["fused"].fused is False


@pytest.mark.parametrize(
    ("context", "why"),
    [
        ({"version": "0.6.18", "tactics": [0, FASTEST]}, "FlashInfer 0.6.18 on SM90"),
        ({"sm": 100, "tactics": [0, FASTEST]}, "on SM100"),
        ({"tactics": [0, 99]}, "which mean nothing here"),
        ({"autotuner": {"tactics": {"trtllm::fused_moe::gemm2 ((8, 64),)": 5}}}, "not on record"),
    ],
)
def test_tactics_that_mean_nothing_here_are_tuned_anew(
    backend: FlashInferCutlass, context: dict[str, Any], why: str
) -> None:
    report = confirm_with(backend, captured(tiny_case(), backend, **context), runs=RUNS)
    assert report.asked == "fused, autotuned"
    asked = named(report)["fused, autotuned"]
    assert why in asked.settings["captured"]
    assert asked.runs_differing > 0
    assert report.outcome == "confirmed"


def test_output_and_workspace_are_the_callers_and_poisoned(
    backend: FlashInferCutlass, machine: Machine
) -> None:
    case = tiny_case()
    variant = next(v for v in backend.variants(case, Options()) if v.name == "unfused")
    prepared = backend.prepare(case, variant)
    prepared.poison("ones")
    with prepared.active():
        output = prepared.run()
    workspace = machine.launched[-1]["workspace"]
    assert workspace is not None
    assert bool((workspace == 255).all())
    assert bool(output.isfinite().all())
    assert prepared.run() is output or torch.equal(prepared.run(), output)


@pytest.mark.parametrize(
    ("parameters", "context", "fused"),
    [
        ({"use_fused_finalize": True}, {}, True),
        ({"use_fused_finalize": False}, {}, False),
        ({}, {"defaults": {"use_fused_finalize": True}}, True),
        ({}, {"defaults": {"use_fused_finalize": None}}, True),
        ({"use_fused_finalize": None}, {}, True),
        ({"use_fused_finalize": None}, {"deterministic_algorithms": True}, False),
        ({"use_fused_finalize": True}, {"deterministic_algorithms": True}, True),
    ],
)
def test_the_finalize_of_a_case_is_what_its_call_resolved_it_to(
    backend: FlashInferCutlass, parameters: dict[str, Any], context: dict[str, Any], fused: bool
) -> None:
    case = tiny_case()
    case = dataclasses.replace(case, parameters={**case.parameters, **parameters}, context=context)
    asked = next(v for v in backend.variants(case, Options()) if v.asked)
    assert asked.settings["use_fused_finalize"] is fused


def test_pinned_profile_ids_are_the_cases_own_tactics(backend: FlashInferCutlass) -> None:
    case = captured(tiny_case(), backend)
    case = dataclasses.replace(case, parameters={**case.parameters, "profile_ids": [-1, FIRST_FUSED]})
    report = confirm_with(backend, case, runs=RUNS)
    assert named(report)["as captured"].tactic == f"gemm1 first, gemm2 {FIRST_FUSED}"


def test_the_case_survives_being_saved(backend: FlashInferCutlass, tmp_path: Any) -> None:
    case = captured(tiny_case(), backend, tactics=[0, FASTEST])
    case.save(tmp_path / "case")
    report = confirm_with(backend, Case.load(tmp_path / "case"), runs=RUNS)
    assert (report.asked, report.outcome) == ("as captured", "confirmed")


def test_the_error_against_float64_is_that_of_one_rounding_and_of_several(
    backend: FlashInferCutlass,
) -> None:
    variants = named(confirm_with(backend, tiny_case(tokens=32), runs=1))
    unfused, fused = variants["unfused"].rel_error, variants["fused, pinned"].rel_error
    assert unfused is not None
    assert fused is not None
    # bf16 rounds to 2^-9 at most; uniform within a binade that is about 0.4 of it, root mean square.
    assert 0.0008 < unfused < 2**-9
    assert 1.3 * unfused < fused < 4 * unfused


class TestVariants:
    PLAN = Plan(3, (3, 4, 5), (3, 4), 4)
    OWN = {"use_fused_finalize": True, "tactics": "untuned"}  # noqa: RUF012

    def test_names_are_unique_and_one_is_asked_first(self) -> None:
        variants = variants_of(self.PLAN, self.OWN, sweep=True)
        assert len({variant.name for variant in variants}) == len(variants)
        assert [variant.asked for variant in variants] == [True] + [False] * (len(variants) - 1)

    def test_nothing_pinned_or_fusing_can_be_recommended(self) -> None:
        candidates = [v for v in variants_of(self.PLAN, self.OWN, sweep=True) if v.role == "candidate"]
        assert {v.name for v in candidates if not v.can_fuse} == {"unfused", "unfused, autotuned"}
        assert all(isinstance(v.settings["tactics"], str) for v in candidates)

    def test_a_runner_without_more_tactics_cannot_fuse(self) -> None:
        plan = Plan(3, (3, 4), (3, 4), None)
        assert not any(v.can_fuse for v in variants_of(plan, self.OWN, sweep=True))


class TestArguments:
    def test_lists_names_and_dtypes_are_rebuilt(self) -> None:
        case = synthetic_case(Synthetic(SHAPE, 4, "fp8"), torch.device("cpu"))
        case = dataclasses.replace(case, parameters={**case.parameters, "activation_type": "Swiglu"})
        built = call.arguments(case, call.Library().signature)
        assert [t.shape for t in built["quant_scales"]] == [(8,), (), (8,), ()]
        assert built["output_dtype"] is torch.bfloat16
        assert built["activation_type"].name == "Swiglu"

    def test_what_the_variant_decides_is_left_out(self) -> None:
        case = tiny_case()
        extra = {"use_fused_finalize": True, "profile_ids": [1, 2]}
        tensors = {**case.tensors, "output": torch.zeros(6, 64), "workspace_buffer": torch.zeros(9)}
        case = dataclasses.replace(case, parameters={**case.parameters, **extra}, tensors=tensors)
        assert not {*extra, "output", "workspace_buffer"} & set(
            call.arguments(case, call.Library().signature)
        )

    @pytest.mark.parametrize("value", [None, False])
    def test_an_argument_this_release_lacks_may_be_absent(self, value: object) -> None:
        case = tiny_case()
        case = dataclasses.replace(case, parameters={**case.parameters, "use_new_thing": value})
        assert "use_new_thing" not in call.arguments(case, call.Library().signature)

    def test_an_argument_this_release_lacks_is_refused(self) -> None:
        case = tiny_case()
        case = dataclasses.replace(case, parameters={**case.parameters, "use_new_thing": True})
        with pytest.raises(Unsupported, match="use_new_thing"):
            call.arguments(case, call.Library().signature)

    def test_an_object_cannot_be_rebuilt(self) -> None:
        case = tiny_case()
        case = dataclasses.replace(
            case, parameters={**case.parameters, "enable_pdl": {"object": "some.Config"}}
        )
        with pytest.raises(Unsupported, match=r"some\.Config"):
            call.arguments(case, call.Library().signature)

    @pytest.mark.parametrize(
        ("release", "lacks"), [("0.6.15", "workspace_buffer"), ("0.6.17", "use_wfp4afp8_humming")]
    )
    def test_older_releases_get_only_what_they_have(self, release: str, lacks: str) -> None:
        parameters = inspect.signature(call.Library().function).parameters
        if lacks not in parameters:
            pytest.skip(f"the installed FlashInfer has no {lacks} either")
        older = inspect.Signature([p for name, p in parameters.items() if name != lacks])
        case = tiny_case()
        case = dataclasses.replace(case, parameters={**case.parameters, lacks: None})
        assert set(call.arguments(case, older)) <= set(older.parameters)


class TestAvailability:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        sm = [90]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
        monkeypatch.setattr(flashinfer_cutlass, "_sm", lambda _device: sm[0])
        return sm

    def sentence(self, case: Case, backend: FlashInferCutlass | None = None) -> str:
        found = (backend or FlashInferCutlass()).availability(case)
        assert isinstance(found, Unavailable)
        return found.sentence

    def test_no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA GPU here; it runs on SM89, SM90, SM100" in self.sentence(tiny_case())

    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
    def test_sm90_runs_these(self, gpu: list[int], dtype: str) -> None:
        assert FlashInferCutlass().availability(tiny_case(dtype=dtype)) == Available(torch.device("cuda", 0))

    def test_nvfp4_on_sm90_names_what_could(self, gpu: list[int]) -> None:
        sentence = self.sentence(tiny_case(dtype="nvfp4"))
        assert "NVFP4 weights cannot run on SM90 (NVIDIA H200)" in sentence
        assert "SM100, SM103, SM107, SM110, SM120, SM121 with FlashInfer 0.6.15 or newer" in sentence

    @pytest.mark.parametrize("sm", [100, 103, 107, 110, 120, 121])
    def test_nvfp4_on_blackwell(self, gpu: list[int], sm: int) -> None:
        gpu[0] = sm
        assert isinstance(FlashInferCutlass().availability(tiny_case(dtype="nvfp4")), Available)

    def test_a_release_without_the_argument(self, gpu: list[int]) -> None:
        backend = FlashInferCutlass()
        vars(backend.library)["version"] = "0.6.14"
        assert "FlashInfer 0.6.14 has no use_fused_finalize" in self.sentence(tiny_case(), backend)

    def test_an_unknown_combination(self, gpu: list[int]) -> None:
        case = tiny_case()
        case = dataclasses.replace(case, tensors={**case.tensors, "input": case.tensors["input"].float()})
        assert "multiplies float32 by weights stored as bfloat16" in self.sentence(case)

    def test_entries(self) -> None:
        for entry in call.ENTRIES:
            assert FlashInferCutlass().accepts(dataclasses.replace(tiny_case(), entry=entry))
        assert not FlashInferCutlass().accepts(dataclasses.replace(tiny_case(), entry="other:kernel"))


def test_gemm2_tactics_follow_gemm1() -> None:
    assert min(FIRST_FUSED, FASTEST) >= GEMM1
