"""Launched kernels beside their machine code: origins, risks, kernels that were not found."""

from __future__ import annotations

import pytest

from detaudit.core.launches import Launches, LaunchReport, ModuleLaunches
from detaudit.core.scans import Atomic, KernelScan, ScanReport
from detaudit.scan.join import join, matched

ADD = Atomic("accumulation", "add", "bf16x8", "global", False, False, "REDG.E.ADD.BF16x8.RN.STRONG.GPU", 2)
TICKET = Atomic("ticket", "add", "u32", "global", True, False, "ATOMG.E.ADD.STRONG.GPU")
EXPERTS = "layers.0.mlp.experts"
MANGLED = "_ZN7fixture11scatter_addILi4EfEEvPT0_PKS1_PKi"
DEMANGLED = "void fixture::scatter_add<4, float>(float*, float const*, int const*)"


def kernel(name: str, *atomics: Atomic, arch: str = "sm_90a", file: str = "moe.so") -> KernelScan:
    return KernelScan(name, name, arch, file, True, atomics)


def joined(
    launches: Launches, *kernels: KernelScan, origins: tuple[str, ...] | None = None, arch: str = "sm_90"
) -> LaunchReport:
    return join(launches, ScanReport(kernels), origins, arch)


def only(report: LaunchReport) -> ModuleLaunches:
    (module,) = report.modules
    return module


def test_an_origin_that_launched_a_suspect_names_it() -> None:
    report = joined(
        {EXPERTS: {"finalize": 1, "gemm": 2}},
        kernel("finalize", ADD),
        kernel("gemm", TICKET),
        origins=(EXPERTS,),
    )
    module = only(report)
    assert (module.module, module.judgement) == (EXPERTS, "suspects in an origin")
    assert [(k.name, k.accumulates) for k in module.suspects] == [("finalize", ("add.bf16x8 global",))]
    assert "finalize" in module.explanation
    assert {k.name: k.meaning for k in module.kernels}["gemm"] == "takes tickets"


def test_an_origin_without_a_suspect_points_at_a_race_or_memory() -> None:
    module = only(joined({EXPERTS: {"gemm": 1}}, kernel("gemm"), origins=(EXPERTS,)))
    assert module.judgement == "origin without a suspect"
    assert "race or uninitialised memory" in module.explanation


def test_such_an_origin_says_what_was_not_read() -> None:
    module = only(joined({EXPERTS: {"gemm": 1, "unknown": 1}}, kernel("gemm"), origins=(EXPERTS,)))
    assert "no machine code was found for unknown" in module.explanation


def test_an_origin_that_launched_nothing_points_at_the_host() -> None:
    module = only(joined({}, origins=("head",)))
    assert (module.module, module.judgement, module.kernels) == ("head", "origin without a suspect", ())
    assert "host" in module.explanation


def test_a_container_answers_for_what_is_inside_it_and_not_for_its_neighbours() -> None:
    launches: Launches = {"mlp.experts": {"finalize": 1}, "mlp2.experts": {"finalize": 1}}
    report = joined(launches, kernel("finalize", ADD), origins=("mlp",))
    assert {m.module: m.judgement for m in report.modules} == {
        "mlp": "suspects in an origin",
        "mlp.experts": "risk",
        "mlp2.experts": "risk",
    }


def test_the_root_answers_for_everything_but_what_is_outside() -> None:
    report = joined({None: {"finalize": 1}}, kernel("finalize", ADD), origins=("",))
    assert {m.module: m.judgement for m in report.modules} == {"": "origin without a suspect", None: "risk"}


def test_a_suspect_in_a_module_that_never_differed_is_a_risk() -> None:
    module = only(joined({"norm": {"finalize": 3}}, kernel("finalize", ADD), origins=()))
    assert (module.judgement, module.suspects[0].launches) == ("risk", 3)
    assert "never differed" in module.explanation


def test_without_an_audit_nothing_is_said_about_differing() -> None:
    report = joined({"norm": {"finalize": 3}}, kernel("finalize", ADD))
    assert not report.audited
    assert "never differed" not in only(report).explanation


def test_origins_come_first_then_risks() -> None:
    launches: Launches = {
        "quiet": {"gemm": 1},
        "b": {"finalize": 1},
        "a": {"finalize": 1},
        EXPERTS: {"gemm": 1},
    }
    report = joined(launches, kernel("finalize", ADD), kernel("gemm"), origins=("a", EXPERTS))
    assert [module.module for module in report.modules] == ["a", EXPERTS, "b", "quiet"]


@pytest.mark.parametrize("name", [MANGLED, DEMANGLED, DEMANGLED.replace(", ", ","), f"{DEMANGLED} "])
def test_a_kernel_is_found_by_symbol_and_by_full_name(name: str) -> None:
    module = only(joined({"m": {name: 1}}, kernel(MANGLED, ADD)))
    assert module.suspects
    assert matched([name, "other"], ScanReport((kernel(MANGLED, ADD),))) == {name}


def test_machine_code_for_another_gpu_is_left_aside() -> None:
    kernels = (kernel("k", ADD, arch="sm_80"), kernel("k", arch="sm_90a"), kernel("k", ADD, arch="sm_100a"))
    assert not only(joined({"m": {"k": 1}}, *kernels, arch="sm_90")).suspects
    assert only(joined({"m": {"k": 1}}, *kernels, arch="sm_80")).suspects
    assert only(joined({"m": {"k": 1}}, *kernels, arch="sm_86")).suspects
    assert only(joined({"m": {"k": 1}}, kernels[0], arch="sm_90")).suspects  # better than nothing


def test_several_kernels_of_one_name_leave_a_doubt() -> None:
    both = (kernel("triton_kernel", ADD, file="a.cubin"), kernel("triton_kernel", file="b.cubin"))
    (found,) = only(joined({"m": {"triton_kernel": 1}}, *both)).kernels
    assert (found.suspect, found.certain, found.files) == (True, False, ("a.cubin", "b.cubin"))
    (alone,) = only(joined({"m": {"triton_kernel": 1}}, both[0])).kernels
    assert alone.certain


def test_json_has_a_format_and_a_version() -> None:
    data = joined({"m": {"k": 1}}, kernel("k", ADD)).to_json()
    assert (data["format"], data["version"]) == ("detaudit-launches", 1)
    assert data["modules"][0]["kernels"][0]["accumulates"] == ("add.bf16x8 global",)
