"""Machines made by hand, for ``detaudit doctor``."""

from __future__ import annotations

from typing import Any

from detaudit.machine import Gpu, Machine

H200 = Gpu("NVIDIA H200", 90, 139.8)
B200 = Gpu("NVIDIA B200", 100, 178.4)
RTX5090 = Gpu("NVIDIA GeForce RTX 5090", 120, 31.4)
FLAGS = {
    "deterministic_algorithms": False,
    "float32_matmul_precision": "highest",
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.allow_tf32": True,
    "threads": 16,
}


def machine(*gpus: Gpu, **changes: Any) -> Machine:
    """A Linux machine with these GPUs, torch 2.13 and FlashInfer 0.7.4; ``changes`` replace fields."""
    values: dict[str, Any] = {
        "python": "3.12.4",
        "system": "Linux 6.8.0 x86_64",
        "cores": 32,
        "gpus": gpus,
        "gpus_present": len(gpus),
        "driver": "580.82.07" if gpus else None,
        "versions": {"torch": "2.13.0", "triton": "3.6.0", "flashinfer-python": "0.7.4"},
        "cuda": "13.0" if gpus else None,
        "nvcc": "/usr/local/cuda/bin/nvcc" if gpus else None,
        "prebuilt": ("90", "100", "120"),
        "flags": FLAGS,
        "disassemblers": ("cuobjdump 13.0.85 (/usr/bin/cuobjdump)", "nvdisasm 13.0.85 (/usr/bin/nvdisasm)"),
    }
    return Machine(**(values | changes))


def with_versions(*gpus: Gpu, **versions: str) -> Machine:
    """The same with other versions; ``_`` stands for ``-`` in a name."""
    return machine(
        *gpus,
        versions={"torch": "2.13.0"}
        | {name.replace("_", "-"): version for name, version in versions.items()},
    )
