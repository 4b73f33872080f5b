"""Running repro scripts where detaudit, numpy and FlashInfer cannot be imported; cases to run them on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from detaudit.kernels.cases import Case
from detaudit.kernels.reference_backend import ReferenceBackend
from detaudit.kernels.shapes import Shape, Synthetic

REFUSED = ("detaudit", "numpy", "flashinfer")
LAUNCHER = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({REFUSED!r}))  # Python refuses to import what is None here
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def isolated(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python repro.py`` with nothing of the checkout on the path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-I", "-W", "ignore", "-c", LAUNCHER, "repro.py", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def reference_case(
    tokens: int = 64, experts: int = 8, top_k: int = 4, hidden: int = 64, intermediate: int = 32
) -> Case:
    """A synthetic call of the reference mixture of experts, on the CPU."""
    shape = Shape("small", experts, top_k, hidden, intermediate)
    case = ReferenceBackend().synthetic(Synthetic(shape, tokens, "nvfp4"))
    assert isinstance(case, Case)
    return case.to(torch.device("cpu"))
