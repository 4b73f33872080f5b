"""Repro folders of FlashInfer's real kernel: from the example's trace, run as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from detaudit.kernels.cases import Case

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        os.environ.get("MOE_DTYPE", "bf16") != "bf16", reason="the prebuilt module is another"
    ),
]

SECONDS = 20.0


def run(folder: Path, *command: object) -> tuple[subprocess.CompletedProcess[str], float]:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done, time.monotonic() - begun


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("moe")
    quick = ("--runs", 4, "--no-history", "--no-observer", "--kernel-runs", 20)
    example = ROOT / "examples" / "flashinfer_moe.py"
    done, _ = run(folder, "-m", "detaudit", "run", example, "--output", "t.detaudit", *quick)
    if done.returncode == 3 or "unsupported" in done.stdout:
        pytest.skip(f"cutlass_fused_moe cannot run here: {done.stdout[-500:]}")
    assert done.returncode == 1, done.stdout + done.stderr
    return folder / "t.detaudit"


@pytest.fixture(scope="module")
def bug(trace: Path) -> Path:
    done, seconds = run(trace.parent, "-m", "detaudit", "repro", trace, "--output", "bug")
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"detaudit repro: {seconds:.1f} s")
    return trace.parent / "bug"


def test_fused_it_differs_and_unfused_it_does_not_each_in_seconds(bug: Path) -> None:
    done, seconds = run(bug, "repro.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "finalizes in its epilogue" in done.stdout
    assert "a fused tactic: " in done.stdout
    assert seconds < SECONDS
    done, seconds = run(bug, "repro.py", "--unfused")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "use_fused_finalize=False: 0 of 100 runs differ" in done.stdout
    assert seconds < SECONDS


def test_the_report_is_for_flashinfer(bug: Path) -> None:
    text = (bug / "REPORT.md").read_text()
    assert text.startswith("# `cutlass_fused_moe` gives different bits for identical inputs")
    assert torch.cuda.get_device_name() in text
    assert "| flashinfer-python | " in text
    assert "use_fused_finalize=False" in text.split("## What avoids it")[1]


def test_minimized_it_is_an_eighth_and_still_differs(trace: Path, bug: Path) -> None:
    command = ("-m", "detaudit", "repro", trace, "--minimize", "--seconds", 120, "--output", "small")
    done, seconds = run(trace.parent, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    print(f"detaudit repro --minimize: {seconds:.1f} s")
    small = trace.parent / "small"
    sizes = [sum(tensor.numel() for tensor in Case.load(folder).tensors.values()) for folder in (small, bug)]
    assert sizes[0] * 8 <= sizes[1]
    assert run(small, "repro.py")[0].returncode == 1
    assert run(small, "repro.py", "--unfused")[0].returncode == 0
