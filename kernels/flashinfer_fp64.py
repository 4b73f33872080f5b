"""What ``cutlass_fused_moe`` computes, in float64 from the same operands, to measure a variant's error by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from detaudit.kernels.backend import Available
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_call import weights_of
from detaudit.kernels.reference_backend import ReferenceBackend

_PLAIN = {"input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights"}


def reference_fp64(case: Case) -> Tensor | None:
    """float64 [T, H]; ``None`` for what is not a plain SwiGLU layer on one rank in NVFP4, bf16, fp16 or fp8.

    Values that the kernel hands from GEMM to GEMM are rounded here only where that is part of what is asked
    for: to fp8 with the given scale, or to NVFP4. So bf16 and fp16 show the rounding of GEMM1's output too.
    """
    weights = weights_of(case)
    if weights == "NVFP4":
        reference = ReferenceBackend()
        plain = isinstance(reference.availability(case), Available)
        return reference.reference_fp64(case) if plain and _is_swiglu(case) else None
    extra = {path for path in case.tensors if path not in _PLAIN and not path.startswith("quant_scales[")}
    if extra - {"output", "workspace_buffer"} or not _is_swiglu(case) or not _on_one_rank(case):
        return None
    if weights in ("bf16", "fp16"):
        return _layer(case, None)
    if weights == "fp8 per tensor":
        return _layer(case, case.group("quant_scales"))
    return None


def _is_swiglu(case: Case) -> bool:
    return case.parameters.get("activation_type") in (None, "Swiglu")


def _on_one_rank(case: Case) -> bool:
    return all(case.parameters.get(name) in (None, 1) for name in ("tp_size", "ep_size"))


def _layer(case: Case, scales: list[Tensor] | None) -> Tensor:
    """``scales``: those of fp8, [fc1 dequantization [E], fc2 quantization, fc2 dequantization [E], ...]."""
    tensors = case.tensors
    x = tensors["input"].double()
    selected, weight = tensors["token_selected_experts"], tensors["token_final_scales"].double()
    out = torch.zeros(
        x.shape[0], tensors["fc2_expert_weights"].shape[1], dtype=torch.float64, device=x.device
    )
    for expert in range(tensors["fc1_expert_weights"].shape[0]):
        token, slot = (selected == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        up, gate = (x[token] @ _scaled(tensors["fc1_expert_weights"][expert], scales, 0, expert).T).chunk(
            2, 1
        )
        hidden = silu(gate) * up
        if scales is not None:
            hidden = (hidden * _of_expert(scales[1], expert)).float().clamp(-448, 448)
            hidden = hidden.to(torch.float8_e4m3fn).double()
        rows = hidden @ _scaled(tensors["fc2_expert_weights"][expert], scales, 2, expert).T
        out.index_add_(0, token, rows * weight[token, slot].unsqueeze(1))
    return out


def _scaled(weight: Tensor, scales: list[Tensor] | None, which: int, expert: int) -> Tensor:
    wide = weight.double()
    return wide if scales is None else wide * _of_expert(scales[which], expert)


def _of_expert(scale: Tensor, expert: int) -> Tensor:
    return (scale[expert] if scale.dim() else scale).double()
