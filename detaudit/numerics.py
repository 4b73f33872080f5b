"""Settings that change a model's bits or its timing, and what each does. Plain data; never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable: how bad it is that it is set, and what it does."""

    level: Level
    what: str


def _note(what: str) -> Variable:
    return Variable("note", what)


VARIABLES: Mapping[str, Variable] = {
    "CUDA_LAUNCH_BLOCKING": Variable(
        "problem", "waits after every launch, which hides races between streams"
    ),
    "CUBLAS_WORKSPACE_CONFIG": _note(
        "decides which cuBLAS algorithms may run; :4096:8 makes them repeatable"
    ),
    "CUBLASLT_WORKSPACE_SIZE": _note("decides which cuBLASLt algorithms may run"),
    "CUDA_DEVICE_MAX_CONNECTIONS": _note("changes how kernels of several streams overlap"),
    "NVIDIA_TF32_OVERRIDE": _note("overrides every TF32 setting"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _note("turns TF32 on for matrix multiplications"),
    "PYTORCH_CUDA_ALLOC_CONF": _note("changes the allocator, and so what uninitialised memory holds"),
    "PYTORCH_ALLOC_CONF": _note("changes the allocator, and so what uninitialised memory holds"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _note(
        "turns the caching allocator off; uninitialised memory reads differently"
    ),
    "ATEN_CPU_CAPABILITY": _note("picks the CPU's vector instructions, and with them the order of sums"),
    "MKL_CBWR": _note("pins MKL's code path: sums are repeatable, and other bits than without"),
    "ONEDNN_DEFAULT_FPMATH_MODE": _note("lets oneDNN compute in a lower precision"),
    "OMP_NUM_THREADS": _note("sets the CPU threads, and with them the order of sums"),
    "MKL_NUM_THREADS": _note("sets MKL's threads, and with them the order of sums"),
    "TORCHINDUCTOR_MAX_AUTOTUNE": _note(
        "compiled code picks kernels by time, which may differ from process to process"
    ),
    "TRITON_F32_DEFAULT": _note("sets the precision of Triton's float32 dot products"),
    "NCCL_ALGO": _note("pins NCCL's algorithm, and with it the order of sums over GPUs"),
    "NCCL_PROTO": _note("pins NCCL's protocol"),
    "NCCL_NVLS_ENABLE": _note("switches reduction inside the NVLink switch"),
    "FLASHINFER_TOPK_ALGO": _note("picks FlashInfer's top-k kernel"),
    "FLASHINFER_TACTICS_BLOCKLIST": _note("takes tactics away from FlashInfer's autotuner"),
    "FLASHINFER_AUTOTUNE_CACHE_DIR": _note(
        "tactics tuned earlier are used; they decide whether the fused kernel runs"
    ),
    "FLASHINFER_AUTOTUNE_DIR": _note("constants calibrated earlier are used"),
    "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE": _note("tactics that ship with FlashInfer are used without tuning"),
    "VLLM_FLASHINFER_MOE_FUSED_FINALIZE": _note("vLLM's switch of the fused finalize; 0 is bit-stable"),
    "VLLM_BATCH_INVARIANT": _note("vLLM runs batch-invariant kernels"),
    "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE": _note("SGLang's switch of the fused finalize; 0 is bit-stable"),
}
"""Environment variables that change numerics or timing."""

FLAGS: Mapping[str, tuple[Any, str]] = {
    "deterministic_algorithms": (False, "torch picks deterministic kernels, or raises where it has none"),
    "float32_matmul_precision": ("highest", "float32 matrix multiplications may run in TF32 or bf16"),
    "cudnn.benchmark": (False, "cuDNN picks kernels by time, which may differ from process to process"),
    "cudnn.deterministic": (False, "cuDNN uses deterministic kernels only"),
    "cudnn.allow_tf32": (True, "convolutions run in full float32"),
}
"""torch's settings: (default, what another value means)."""
