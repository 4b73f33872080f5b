"""The fingerprint: JSON, complete, without secrets, without side effects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from detaudit.environment import MORE_VARIABLES, environment, parse_gpus, settings, variables
from detaudit.numerics import VARIABLES

ROOT = Path(__file__).resolve().parents[1]


def test_it_is_json_and_complete() -> None:
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["versions"]["torch"] == torch.__version__
    assert found["torch"]["git"] == torch.version.git_version
    assert found["torch"]["cuda"] == torch.version.cuda
    assert found["cpu"]["model"]
    assert 1 <= found["cpu"]["cores_available"] <= found["cpu"]["cores"]
    assert environment() == found


@pytest.fixture
def _numerics_as_before() -> Any:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    benchmark, dtype = torch.backends.cudnn.benchmark, torch.get_default_dtype()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_default_dtype(dtype)


@pytest.mark.usefixtures("_numerics_as_before")
def test_settings_follow_torch() -> None:
    before = settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = not before["cudnn.benchmark"]
    torch.set_default_dtype(torch.float64)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = settings()
    changed = {name for name in before if inside[name] != before[name]}
    assert changed >= {
        "deterministic_algorithms",
        "deterministic_algorithms.warn_only",
        "threads",
        "float32_matmul_precision",
        "cudnn.benchmark",
        "default_dtype",
        "inference_mode",
        "grad",
        "autocast.cpu",
    }
    assert (inside["threads"], inside["default_dtype"], inside["autocast.cpu"]) == (3, "float64", "bfloat16")


def test_every_setting_of_the_oldest_supported_torch_is_there() -> None:
    """Newer ones may be missing in an older torch; these have been there since 2.9."""
    assert settings().keys() >= {
        "deterministic_algorithms",
        "fill_uninitialized_memory",
        "float32_matmul_precision",
        "matmul.allow_tf32",
        "matmul.bf16_reduced_precision_reduction",
        "matmul.fp16_reduced_precision_reduction",
        "cudnn.allow_tf32",
        "cudnn.benchmark",
        "cudnn.deterministic",
        "sdp.flash",
        "sdp.math",
        "threads",
        "default_dtype",
    }


def test_only_listed_variables_are_recorded() -> None:
    environ = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        "NVIDIA_TF32_OVERRIDE": "",
        "HF_TOKEN": "secret",
        "VLLM_API_KEY": "secret",
        "FLASHINFER_CUBINS_REPOSITORY": "https://user:secret@host",
        "TORCH_SOMETHING": "secret",
        "PATH": "/bin",
    }
    assert variables(environ) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "",
        "PYTHONHASHSEED": "0",
    }


def test_no_variable_that_could_hold_a_secret_is_listed() -> None:
    listed = {*VARIABLES, *MORE_VARIABLES}
    for word in ("TOKEN", "KEY", "SECRET", "PASS", "AUTH_", "CRED", "URL", "PROXY", "REPOSITORY"):
        assert not [name for name in listed if word in name]


def test_looking_changes_nothing_and_leaves_cuda_alone() -> None:
    code = """
import torch, warnings
warnings.simplefilter("error")
state = torch.random.get_rng_state()
from detaudit.environment import environment, settings
before = settings()
environment()
assert settings() == before
assert torch.equal(torch.random.get_rng_state(), state)
assert not torch.cuda.is_initialized()
import sys
assert "flashinfer" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_gpus_as_the_drivers_tool_lists_them() -> None:
    listed = "NVIDIA H200, 9.0, 143771\nNVIDIA RTX PRO 6000, Edition, 12.0, 97887\nNo devices were found\n"
    assert parse_gpus(listed) == [
        {"name": "NVIDIA H200", "sm": 90, "memory_gib": 140},
        {"name": "NVIDIA RTX PRO 6000, Edition", "sm": 120, "memory_gib": 96},
    ]
    assert parse_gpus("") == []


@pytest.mark.parametrize(("script", "found"), [("echo 'NVIDIA B200, 10.0, 183359'", 1), ("exit 9", 0)])
def test_the_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert len(environment()["gpu"]["devices"]) == found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_both_ways_of_asking_for_gpus_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")
    asked_torch = environment()["gpu"]["devices"]
    assert [gpu["sm"] for gpu in asked_torch] == [
        10 * major + minor for major, minor in map(torch.cuda.get_device_capability, range(len(asked_torch)))
    ]
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    listed = environment()["gpu"]["devices"]
    assert {gpu["name"] for gpu in asked_torch} <= {gpu["name"] for gpu in listed}
