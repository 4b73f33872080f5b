"""``detaudit doctor``: the diagnosis of machines that are not here, and the probing of the one that is."""

from __future__ import annotations

import dataclasses
import io
import json
from importlib import metadata
from pathlib import Path

import pytest

from detaudit import cli
from detaudit.commands import doctor as command
from detaudit.doctor import Diagnosis, diagnose, version_numbers
from detaudit.kernels.support import KERNELS, module_of
from detaudit.machine import Machine, compiled_modules, driver_version, probe, tuning_caches
from detaudit.numerics import VARIABLES
from tests.cli.machines import B200, FLAGS, H200, RTX5090, machine, with_versions
from tests.cli.programs import detaudit, environment


def said(diagnosis: Diagnosis, level: str) -> str:
    return "\n".join(f"{check.text} {check.fix}" for check in diagnosis.checks if check.level == level)


def runs(diagnosis: Diagnosis) -> dict[str, bool]:
    return {kernel.kernel: kernel.runs for kernel in diagnosis.kernels}


def test_hopper_runs_bf16_and_fp8_and_not_nvfp4() -> None:
    found = diagnose(machine(H200))
    assert runs(found) == {
        "cutlass_fused_moe NVFP4": False,
        "cutlass_fused_moe bf16": True,
        "cutlass_fused_moe fp16": True,
        "cutlass_fused_moe fp8 per tensor": True,
        "cutlass_fused_moe fp8 block scale": True,
        "cutlass_fused_moe W4A16 MXFP4": True,
        "cutlass_fused_moe W4A8 int4": True,
        "cute_dsl_fused_moe_nvfp4 NVFP4": False,
        "cute_dsl_fused_moe_bf16 bf16": True,
        "b12x_fused_moe NVFP4": False,
        "trtllm_fp4_block_scale_moe NVFP4": False,
    }
    texts = {kernel.kernel: kernel.text for kernel in found.kernels}
    assert texts["cutlass_fused_moe NVFP4"].startswith("not on SM90; runs on SM100")
    assert "can be taken once autotuned" in texts["cutlass_fused_moe bf16"]
    assert "never fused here" in texts["cutlass_fused_moe fp8 block scale"]
    assert "tuned or not" in texts["cute_dsl_fused_moe_bf16 bf16"]
    assert said(found, "problem") == ""


@pytest.mark.parametrize("gpu", [B200, RTX5090])
def test_blackwell_runs_nvfp4(gpu: object) -> None:
    found = diagnose(machine(gpu))  # type: ignore[arg-type]
    assert runs(found)["cutlass_fused_moe NVFP4"]
    assert not runs(found)["cutlass_fused_moe W4A16 MXFP4"]


def test_consumer_blackwell_never_fuses_bf16_and_has_a_kernel_without_a_switch() -> None:
    texts = {kernel.kernel: kernel.text for kernel in diagnose(machine(RTX5090)).kernels}
    assert "never fused here" in texts["cutlass_fused_moe bf16"]
    assert "no switch" in texts["b12x_fused_moe NVFP4"]


def test_two_kinds_of_gpu_are_judged_apart() -> None:
    found = diagnose(machine(B200, H200, H200))
    assert [kernel.sm for kernel in found.kernels] == [90] * len(KERNELS) + [100] * len(KERNELS)


def test_no_gpu_is_a_note_and_names_the_gpus_that_could() -> None:
    found = diagnose(machine())
    assert "audited on the CPU" in said(found, "note")
    assert not any(runs(found).values())
    assert all("no GPU; runs on SM" in kernel.text for kernel in found.kernels)
    assert said(found, "problem") == ""


def test_the_disassembler_or_how_to_install_it() -> None:
    found = [c for c in diagnose(machine()).checks if "detaudit scan" in c.text]
    assert [(c.level, "nvdisasm 13.0.85" in c.text) for c in found] == [("ok", True)]
    (missing,) = [c for c in diagnose(machine(disassemblers=())).checks if "detaudit scan" in c.text]
    assert (missing.level, missing.fix) == ("note", "pip install 'detaudit[scan]'")


def test_gpu_that_torch_cannot_use() -> None:
    assert "torch is built without CUDA" in said(diagnose(machine(gpus_present=2)), "problem")
    found = diagnose(machine(gpus_present=2, cuda="13.0", driver="470.1"))
    assert "cannot start CUDA 13.0" in said(found, "problem")
    assert "driver 470.1" in said(found, "problem")


def test_torch_that_cannot_be_imported() -> None:
    found = diagnose(machine(torch_error="ImportError: libcudart.so.13", versions={}, flags={}))
    assert "torch cannot be imported: ImportError: libcudart.so.13" in said(found, "problem")


@pytest.mark.parametrize("version", ["0.6.15", "0.6.17"])
def test_populated_tuning_cache_of_an_old_flashinfer_is_a_problem(version: str) -> None:
    old = with_versions(H200, flashinfer_python=version)
    assert "autotune cache" in said(diagnose(old), "note")
    assert "autotune cache" not in said(diagnose(old), "problem")
    found = diagnose(dataclasses.replace(old, tuning_caches={"/cache/autotune": 3}))
    assert "Populated here: /cache/autotune (3 files)" in said(found, "problem")
    assert "upgrade FlashInfer to 0.6.18" in said(found, "problem")


def test_populated_tuning_cache_of_a_fixed_flashinfer_is_a_note() -> None:
    found = diagnose(
        dataclasses.replace(with_versions(H200, flashinfer_python="0.6.18"), tuning_caches={"/c": 3})
    )
    assert "autotune cache" not in said(found, "problem")
    assert "tuned earlier decide whether the fused kernel runs: /c (3 files)" in said(found, "note")


@pytest.mark.parametrize(("version", "problem"), [("0.7.4", True), ("0.7.2.post1", False), ("0.6.18", False)])
def test_deterministic_flag_changes_the_default_of_new_versions_only(version: str, problem: bool) -> None:
    base = with_versions(H200, flashinfer_python=version)
    found = diagnose(dataclasses.replace(base, flags=FLAGS | {"deterministic_algorithms": True}))
    assert ("turns the fused finalize off by default" in said(found, "problem")) is problem
    assert "deterministic_algorithms is True" in said(found, "note")


@pytest.mark.parametrize(
    ("version", "level", "text"),
    [
        ("0.6.14", "problem", "no use_fused_finalize before 0.6.15"),
        ("0.6.16", "ok", "0.6.16: use_fused_finalize is True by default"),
        ("0.7.2.post1", "ok", "use_fused_finalize is True by default"),
        ("0.7.4", "ok", "fused unless torch.use_deterministic_algorithms(True)"),
        ("0.8.0", "note", "0.8.0 is newer than what was read (0.7.4)"),
    ],
)
def test_default_of_each_version(version: str, level: str, text: str) -> None:
    assert text in said(diagnose(with_versions(H200, flashinfer_python=version)), level)


def test_what_makes_a_comparison_vacuous_is_always_said() -> None:
    notes = said(diagnose(machine(H200)), "note")
    assert "top_k of 1 or 2" in notes
    assert "without autotuning" in notes
    assert "not installed" in said(diagnose(with_versions(H200)), "note")


def test_kernels_of_a_later_release() -> None:
    kernels = {k.kernel: k for k in diagnose(with_versions(H200, flashinfer_python="0.6.18")).kernels}
    assert kernels["cute_dsl_fused_moe_bf16 bf16"].text == "needs FlashInfer 0.7.0 or newer"


def test_module_that_must_be_compiled_first() -> None:
    slow = diagnose(machine(H200, prebuilt=()))
    assert "the first call compiles it" in said(slow, "note")
    assert "install flashinfer-jit-cache 0.7.4" in said(slow, "note")
    assert "cannot be compiled without nvcc" in said(
        diagnose(machine(H200, prebuilt=(), nvcc=None)), "problem"
    )
    assert "prebuilt" not in said(diagnose(machine(H200)), "note")
    assert {sm: module_of(sm) for sm in (80, 89, 90, 100, 103, 110, 120, 121)} == {
        80: None, 89: "89", 90: "90", 100: "100", 103: "103", 110: "100", 120: "120", 121: "120",
    }  # fmt: skip


def test_variables_that_change_numerics_are_named_with_what_they_do() -> None:
    variables = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_LAUNCH_BLOCKING": "1",
        "HOME": "/root",
        "MKL_CBWR": "",
    }
    found = diagnose(machine(H200, variables=variables))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8: decides which cuBLAS" in said(found, "note")
    assert "hides races between streams unset CUDA_LAUNCH_BLOCKING" in said(found, "problem")
    assert "MKL_CBWR" not in said(found, "note")
    stored = found.to_json()["machine"]["variables"]
    assert stored == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_LAUNCH_BLOCKING": "1"}


def test_flags_other_than_the_defaults_are_noted() -> None:
    found = diagnose(
        machine(H200, flags=FLAGS | {"cudnn.benchmark": True, "float32_matmul_precision": "high"})
    )
    assert "cudnn.benchmark is True: cuDNN picks kernels by time" in said(found, "note")
    assert "float32_matmul_precision is high" in said(found, "note")
    assert "torch's own settings are the defaults" in said(diagnose(machine(H200)), "ok")


def test_engines_that_are_installed_get_their_switch() -> None:
    found = diagnose(with_versions(H200, flashinfer_python="0.7.4", sglang="0.5.23", vllm="0.33.0"))
    engines = [check.text for check in found.checks if check.topic == "engines"]
    assert [text.split(",")[0] for text in engines] == ["vllm 0.33.0", "sglang 0.5.23"]
    assert "VLLM" in engines[0] or "vLLM" in engines[0] or "no switch" in engines[0]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.7.2.post1", (0, 7, 2)),
        ("0.6.17", (0, 6, 17)),
        ("0.8.0rc1", (0, 8, 0)),
        ("1.0+cu130", (1, 0, 130)),
        (None, None),
    ],
)
def test_version_numbers(version: str | None, numbers: tuple[int, ...] | None) -> None:
    assert version_numbers(version) == numbers


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
            "GCC version: gcc version 12.3.0 (Ubuntu 12.3.0)\n",
            "580.82.07",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
            "535.129.03",
        ),
        ("", None),
    ],
)
def test_driver_version(text: str, version: str | None) -> None:
    assert driver_version(text) == version


def test_tuning_caches_are_those_that_hold_files(tmp_path: Path) -> None:
    default = tmp_path / ".cache" / "flashinfer" / "autotune"
    default.mkdir(parents=True)
    named = tmp_path / "named"
    variables = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_AUTOTUNE_CACHE_DIR": str(named)}
    assert tuning_caches(variables) == {}
    (named / "v2").mkdir(parents=True)
    (named / "v2" / "entry.json").write_text("{}")
    (default / "a.json").write_text("{}")
    assert tuning_caches(variables) == {str(named): 1, str(default): 1}


def test_compiled_modules_are_found_in_packages_and_folders(tmp_path: Path) -> None:
    package = tmp_path / "flashinfer_jit_cache_sm100-0.7.4.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: flashinfer-jit-cache-sm100\nVersion: 0.7.4\n")
    (package / "RECORD").write_text("cache/fused_moe_100/fused_moe_100.so,,\ncache/other_90/other_90.so,,\n")
    module = tmp_path / "aot" / "fused_moe_90" / "fused_moe_90.so"
    module.parent.mkdir(parents=True)
    module.touch()
    distributions = metadata.distributions(path=[str(tmp_path)])
    assert compiled_modules(distributions, [tmp_path / "aot", tmp_path / "missing"]) == ("100", "90")


def test_probe_tells_the_truth_about_this_machine() -> None:
    torch = pytest.importorskip("torch")
    found = probe()
    assert found.versions["torch"] == torch.__version__
    assert found.flags["threads"] == torch.get_num_threads()
    assert bool(found.gpus) == torch.cuda.is_available()
    assert found.torch_error is None


def test_probing_changes_nothing() -> None:
    from detaudit.machine import torch_flags

    before = torch_flags()
    probe()
    assert torch_flags() == before


def test_text_on_every_machine(tmp_path: Path) -> None:
    for found in (machine(H200), machine(), machine(torch_error="x")):
        stream = io.StringIO()
        command.render(diagnose(found), stream)
        assert max(map(len, stream.getvalue().splitlines())) <= 100


def test_command_shows_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake() -> Machine:
        return machine(H200, variables={"CUDA_LAUNCH_BLOCKING": "1"})

    monkeypatch.setattr("detaudit.machine.probe", fake)
    path = tmp_path / "doctor.json"
    assert cli.run(["doctor", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "problem  CUDA_LAUNCH_BLOCKING=1" in shown.out
    assert shown.err == f"Wrote {path}\n"
    body = json.loads(path.read_text())
    assert (body["format"], body["version"]) == ("detaudit-doctor", 1)
    assert body["machine"]["gpus"][0]["sm"] == 90
    assert cli.run(["doctor", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == body


def test_a_broken_torch_is_a_result_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    done = detaudit("doctor", "--json", tmp_path / "out.json", env=environment(PYTHONPATH=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert "problem  torch cannot be imported: ImportError: libcudart.so.13 is missing" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["machine"]["gpus"] == []


def test_every_variable_says_what_it_does() -> None:
    assert all(known.what and not known.what.endswith(".") for known in VARIABLES.values())
