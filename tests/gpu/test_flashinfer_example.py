"""examples/flashinfer_moe.py from the command line: tuned, untuned, and with the finalize unfused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flashinfer_moe.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        os.environ.get("MOE_DTYPE", "bf16") != "bf16", reason="the prebuilt module is another"
    ),
]


def detaudit(*args: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "detaudit", *map(str, args)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def audited(folder: Path, code: int, **environment: str) -> dict[str, Any]:
    done = detaudit(
        "run",
        EXAMPLE,
        "--output",
        folder / "t.detaudit",
        "--json",
        folder / "t.json",
        folder=folder,
        **environment,
    )
    assert done.returncode == code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "t.json").read_text())
    return report


def test_tuned_the_experts_are_the_origin_and_unfused_is_confirmed(tmp_path: Path) -> None:
    report = audited(tmp_path, 1)
    assert report["verdict"] == "nondeterministic"
    assert report["origins"][0]["module"] == "layers.0.mlp.experts"
    (kernel,) = report["kernels"]
    variants = {variant["name"]: variant for variant in kernel["variants"]}
    assert kernel["outcome"] == "confirmed"
    assert kernel["asked"] == "as captured"
    assert variants["as captured"]["runs_differing"] > 0
    assert variants["fused, pinned"]["runs_differing"] > 0
    assert (variants["unfused"]["runs"], variants["unfused"]["runs_differing"]) == (300, 0)
    assert kernel["recommended"]["settings"]["use_fused_finalize"] is False
    assert "times the median time" in kernel["recommended"]["cost"]
    saved = list(tmp_path.glob("t.detaudit.d/case-*"))
    assert len(saved) == 1
    again = detaudit("kernels", saved[0], "--runs", 50, folder=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "confirmed" in again.stdout


def test_untuned_it_is_deterministic_because_the_fused_kernel_did_not_run(tmp_path: Path) -> None:
    report = audited(tmp_path, 0, DETAUDIT_EXAMPLE_TUNE="0")
    assert report["verdict"] == "deterministic"
    assert [finding["kind"] for finding in report["findings"]] == ["fused-not-run"]
    (saved,) = tmp_path.glob("t.detaudit.d/case-*")
    again = detaudit("kernels", saved, "--runs", 50, folder=tmp_path)
    assert again.returncode == 3, again.stdout + again.stderr
    assert "vacuous-control" in again.stdout
    assert "tune and capture again" in " ".join(again.stdout.split())


def test_unfused_it_is_deterministic_and_the_kernel_stable(tmp_path: Path) -> None:
    report = audited(tmp_path, 0, DETAUDIT_EXAMPLE_FINALIZE="unfused")
    assert report["verdict"] == "deterministic"
    (kernel,) = report["kernels"]
    assert kernel["outcome"] == "confirmed"
    assert [finding["kind"] for finding in report["findings"]] == []
