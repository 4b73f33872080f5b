"""The kernels that modules launch on a GPU, beside their machine code: torch's, Triton's, FlashInfer's.

Needs a disassembler on this machine (CUDA's, Triton's, or the extra ``scan``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scan.support import tools

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flashinfer_moe.py"
EXPERTS = ("layers.0.mlp.experts", "layers.1.mlp.experts")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

TORCH_TARGET = """
import torch
from torch import nn


class Combine(nn.Module):
    def forward(self, rows, tokens):
        return torch.zeros(64, 512, device="cuda").index_add_(0, tokens, rows)


class Scale(nn.Module):
    def forward(self, x):
        return x * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.combine, self.scale = Combine(), Scale()

    def forward(self, rows, tokens):
        return self.scale(self.combine(rows, tokens))


def build_model():
    return Model()


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8192, 512, generator=generator).cuda()
    return rows, torch.randint(64, (8192,), generator=generator).cuda()
"""

TRITON_TARGET = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def detaudit_test_scatter(out, x, index, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(index + at, at < n), tl.load(x + at, at < n), at < n)


@triton.jit
def detaudit_test_double(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


class Scatter(nn.Module):
    def forward(self, x, index):
        out = torch.zeros(64, device="cuda")
        detaudit_test_scatter[(x.numel() // 256,)](out, x, index, x.numel(), BLOCK=256)
        return out


class Double(nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        detaudit_test_double[(1,)](out, x, x.numel(), BLOCK=256)
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scatter, self.twice = Scatter(), Double()

    def forward(self, x, index):
        return self.twice(self.scatter(x, index))


def build_model():
    return Model()


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=generator).cuda()
    return x, torch.randint(64, (1 << 16,), generator=generator).cuda()
"""


def detaudit(*args: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "detaudit", *map(str, args)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment},
        capture_output=True,
        text=True,
        timeout=800,
    )


def joined(target: Path, folder: Path, *args: object, **environment: str) -> dict[str, dict[str, Any]]:
    """Modules of the report by path."""
    tools()
    report = folder / "launches.json"
    done = detaudit(
        "scan", "--run", target, *args, "--format", "json", "--output", report, folder=folder, **environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    modules = json.loads(report.read_text())["modules"]
    return {module["module"]: module for module in modules}


def suspects(module: dict[str, Any]) -> list[dict[str, Any]]:
    return [kernel for kernel in module["kernels"] if kernel["accumulates"]]


def test_index_add_is_the_suspect_of_the_module_that_calls_it(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    target.write_text(TORCH_TARGET)
    modules = joined(target, tmp_path)
    assert modules["combine"]["judgement"] == "risk"
    found = suspects(modules["combine"])
    assert found
    assert all(way.startswith("add.f32 ") for kernel in found for way in kernel["accumulates"])
    assert modules["scale"]["judgement"] == "nothing found"
    assert modules["scale"]["kernels"][0]["meaning"] == "no unordered accumulation found"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_triton_kernel_is_found_in_its_cache(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    target.write_text(TRITON_TARGET)
    modules = joined(target, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "triton"))
    (suspect,) = suspects(modules["scatter"])
    assert (suspect["name"], suspect["accumulates"]) == ("detaudit_test_scatter", ["add.f32 global"])
    assert modules["twice"]["judgement"] == "nothing found"


needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None or os.environ.get("MOE_DTYPE", "bf16") != "bf16",
    reason="FlashInfer is not installed, or the prebuilt module is another",
)


@needs_flashinfer
def test_tuned_the_finalize_kernel_is_the_suspect_of_the_experts(tmp_path: Path) -> None:
    audit = detaudit("run", EXAMPLE, "--output", tmp_path / "t.detaudit", folder=tmp_path)
    assert audit.returncode == 1, audit.stdout + audit.stderr
    modules = joined(EXAMPLE, tmp_path, "--audit", tmp_path / "t.detaudit")
    first = modules[EXPERTS[0]]
    assert first["judgement"] == "suspects in an origin"
    for path in EXPERTS:
        found = suspects(modules[path])
        assert {kernel["finalize"] for kernel in found} == {"FINALIZE"}
        assert {tuple(kernel["accumulates"]) for kernel in found} == {("add.bf16x8 global",)}


@needs_flashinfer
def test_unfused_no_suspect_is_left_in_the_experts(tmp_path: Path) -> None:
    modules = joined(EXAMPLE, tmp_path, DETAUDIT_EXAMPLE_FINALIZE="unfused")
    for path in EXPERTS:
        assert modules[path]["kernels"], "the experts launched nothing"
        assert not suspects(modules[path])
        assert any("finalizeMoeRouting" in kernel["name"] for kernel in modules[path]["kernels"])
