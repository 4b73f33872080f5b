"""What a run's bits depend on besides the target: the machine, the versions, torch's settings.

Two audits whose environments are equal can be compared with each other. Nothing is changed by looking, and
CUDA is not initialised by it. Only the environment variables listed here are ever recorded, by exact name, so
that no secret gets into a trace.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from detaudit import __version__
from detaudit.machine import PACKAGES, driver_version, installed
from detaudit.numerics import VARIABLES

LIBRARIES = (
    "flashinfer-cubin",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "safetensors",
    "xxhash",
)
"""Distributions recorded besides ``machine.PACKAGES``: libraries whose kernels torch calls, and our own."""

MORE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "DNNL_DEFAULT_FPMATH_MODE",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_DISABLE_JIT",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_DETERMINISTIC_REDUCTION",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NUMEXPR_NUM_THREADS",
    "OMP_DYNAMIC",
    "OMP_PROC_BIND",
    "OMP_SCHEDULE",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_JIT",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_DETERMINISTIC",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LINALG_PREFER_CUSOLVER",
    "TRITON_INTERPRET",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_USE_FLASHINFER_SAMPLER",
)
"""Variables recorded besides ``numerics.VARIABLES``: of less effect, or only on some machines."""

NVIDIA_SMI_SECONDS = 10.0

# Partly untyped in torch, and set up by module tricks that type checkers cannot follow.
_BACKENDS: Any = torch.backends
_CUDA: Any = torch.cuda


def environment() -> dict[str, Any]:
    """JSON-compatible fingerprint of this process; what cannot be found out is ``None`` or left out.

    Keys: ``python``, ``system``, ``libc``; ``cpu`` (model, vector instructions torch uses, cores);
    ``versions`` by distribution; ``torch`` (git revision, debug build, CUDA and cuDNN it was built with);
    ``gpu`` (driver; name, compute capability and GiB of each); ``settings`` of torch that change numerics;
    ``variables`` of the environment that are set and do.
    """
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": _cpu(),
        "versions": _versions(),
        "torch": _build(),
        "gpu": {"driver": _driver(), "devices": _gpus()},
        "settings": settings(),
        "variables": variables(os.environ),
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the listed variables that are set."""
    names = sorted({*VARIABLES, *MORE_VARIABLES})
    return {name: environ[name] for name in names if name in environ}


def settings() -> dict[str, Any]:
    """Torch's settings that change numerics, by name; one that this torch does not have is left out."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        # Some getters are deprecated in newer versions.
        warnings.simplefilter("ignore")
        for name, read in _settings().items():
            try:
                value = read()
            except (AttributeError, RuntimeError):
                continue
            plain = value is None or isinstance(value, (bool, int, float))
            found[name] = value if plain else str(value).rpartition(".")[2]
    return found


def _settings() -> dict[str, Callable[[], Any]]:
    return {**_mode_settings(), **_precision_settings(), **_attention_settings()}


def _mode_settings() -> dict[str, Callable[[], Any]]:
    cudnn, mkldnn = _BACKENDS.cudnn, _BACKENDS.mkldnn
    deterministic: Any = torch.utils.deterministic
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_algorithms.warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fill_uninitialized_memory": lambda: deterministic.fill_uninitialized_memory,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "mkldnn.enabled": lambda: mkldnn.enabled,
        "mkldnn.deterministic": lambda: mkldnn.deterministic,
        "linalg_library": _BACKENDS.cuda.preferred_linalg_library,
        "blas_library": _BACKENDS.cuda.preferred_blas_library,
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "grad": torch.is_grad_enabled,
        "inference_mode": torch.is_inference_mode_enabled,
    }


def _precision_settings() -> dict[str, Callable[[], Any]]:
    matmul, cudnn, mkldnn = _BACKENDS.cuda.matmul, _BACKENDS.cudnn, _BACKENDS.mkldnn
    return {
        "default_dtype": torch.get_default_dtype,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "matmul.allow_tf32": lambda: matmul.allow_tf32,
        "matmul.fp32_precision": lambda: matmul.fp32_precision,
        "matmul.bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "matmul.fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul.fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "cudnn.conv.fp32_precision": lambda: cudnn.conv.fp32_precision,
        "mkldnn.fp32_precision": lambda: mkldnn.fp32_precision,
        "autocast.cpu": lambda: torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "autocast.cuda": lambda: (
            torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        ),
    }


def _attention_settings() -> dict[str, Callable[[], Any]]:
    cuda = _BACKENDS.cuda
    return {
        "sdp.flash": cuda.flash_sdp_enabled,
        "sdp.mem_efficient": cuda.mem_efficient_sdp_enabled,
        "sdp.math": cuda.math_sdp_enabled,
        "sdp.cudnn": cuda.cudnn_sdp_enabled,
        "sdp.reduced_precision_math": cuda.fp16_bf16_reduction_math_sdp_allowed,
    }


def _cpu() -> dict[str, Any]:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": _cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "cores_available": available,
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {name: version for name in (*PACKAGES, *LIBRARIES) if (version := installed(name)) is not None}
    return found | {"detaudit": __version__, "torch": torch.__version__}


def _build() -> dict[str, Any]:
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "git": torch.version.git_version,
        "debug": torch.version.debug,
        "cuda": torch.version.cuda,
        "cudnn": _BACKENDS.cudnn.version(),
        "blas": blas.group(1) if blas else None,
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return driver_version(text)


def _gpus() -> list[dict[str, Any]]:
    """From torch where it has initialised CUDA already; otherwise as the driver's tool lists them."""
    if not _CUDA.is_initialized():
        return parse_gpus(_nvidia_smi())
    return [
        _gpu(found.name, 10 * found.major + found.minor, found.total_memory / 2**30)
        for found in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def _nvidia_smi() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_gpus(listed: str) -> list[dict[str, Any]]:
    """From lines such as ``NVIDIA H200, 9.0, 143771`` (MiB); other lines are passed over."""
    lines = re.findall(r"^(.+), (\d+)\.(\d+), (\d+)\s*$", listed, re.MULTILINE)
    return [_gpu(name, 10 * int(major) + int(minor), int(mib) / 1024) for name, major, minor, mib in lines]


def _gpu(name: str, sm: int, memory_gib: float) -> dict[str, Any]:
    return {"name": name, "sm": sm, "memory_gib": round(memory_gib)}
