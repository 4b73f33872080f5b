"""A mixture of experts in NVFP4, in plain torch: the kernel that can be audited without a GPU.

It does what FlashInfer's CUTLASS MoE does for NVFP4 x NVFP4, in the same layouts: tokens grouped by expert,
activations quantized with a given global scale before each GEMM, products of E2M1 times E4M3 operands summed
in float32 and scaled by ``1 / (activation global * weight global)``, SwiGLU, and the finalize of choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from detaudit.core.errors import UsageError
from detaudit.kernels import nvfp4
from detaudit.kernels.finalize import Accumulate, Finalize, check_modes, finalize_atomic, finalize_ordered
from detaudit.kernels.router import Router
from detaudit.kernels.swizzle import swizzle, unswizzle

_GROUP_ELEMENTS = 1 << 21


def reference_moe(
    x: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_weight: Tensor,
    fc1_scale: Tensor,
    fc1_global: Tensor,
    fc2_weight: Tensor,
    fc2_scale: Tensor,
    fc2_global: Tensor,
    a1_global: Tensor,
    a2_global: Tensor,
    *,
    finalize: Finalize = "atomic",
    accumulate: Accumulate = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """The experts' output for tokens that are already routed. Inference only: autograd sees nothing of it.

    Args:
        x: hidden states [T, H], floating; intermediate results are rounded to its dtype, as in the kernel.
        token_selected_experts: int32 [T, k].
        token_final_scales: float32 [T, k].
        fc1_weight: packed E2M1 uint8 [E, 2I, H/2], rows up (w3) then gate (w1).
        fc1_scale: E4M3 uint8 [E, pad128(2I), pad4(H/16)] in the 128x4 layout.
        fc1_global: float32 [E], 448 * 6 / amax of each expert's weight.
        fc2_weight: uint8 [E, H, I/2].
        fc2_scale: uint8 [E, pad128(H), pad4(I/16)] in the 128x4 layout.
        fc2_global: float32 [E].
        a1_global, a2_global: float32 0-d, 448 * 6 / amax of the input of the first and the second GEMM.
        finalize: ``atomic`` (races) or ``ordered`` (fixed order of k, float32, one rounding).
        accumulate: of the atomic finalize; ``ordered`` always accumulates in float32.
        out: [T, H] in the dtype of ``x``, overwritten; allocated if not given.

    Returns:
        [T, H] in the dtype of ``x``; ``out`` if it was given.

    Raises:
        UsageError: an unknown mode, an expert that does not exist, or a size that NVFP4 cannot hold.
    """
    check_modes(finalize, accumulate)
    routes = _routes(token_selected_experts, fc1_weight.shape[0])
    first = _Gemm(fc1_weight, fc1_scale, fc1_global, a1_global)
    second = _Gemm(fc2_weight, fc2_scale, fc2_global, a2_global)
    rows = _expert_rows(x.detach(), routes, first, second, torch.float32)
    scales = token_final_scales.detach()
    out = torch.empty_like(x, requires_grad=False) if out is None else out
    if finalize == "ordered":
        return finalize_ordered(rows, routes.order, scales, out)
    return finalize_atomic(rows, routes.order, scales, out, accumulate)


def moe_fp64(
    x: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_weight: Tensor,
    fc1_scale: Tensor,
    fc1_global: Tensor,
    fc2_weight: Tensor,
    fc2_scale: Tensor,
    fc2_global: Tensor,
    a1_global: Tensor,
    a2_global: Tensor,
) -> Tensor:
    """`reference_moe` on the same quantized operands with float64 GEMMs, activation and sum: float64 [T, H].

    The activations are quantized as in the kernel, which is part of what it computes, so the distance to this
    is the error of its arithmetic and not that of NVFP4.
    """
    routes = _routes(token_selected_experts, fc1_weight.shape[0])
    first = _Gemm(fc1_weight, fc1_scale, fc1_global, a1_global)
    second = _Gemm(fc2_weight, fc2_scale, fc2_global, a2_global)
    rows = _expert_rows(x, routes, first, second, torch.float64)
    out = torch.empty_like(x, dtype=torch.float64)
    return finalize_ordered(rows, routes.order, token_final_scales.double(), out)


def dense_moe(
    x: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, fc1: Tensor, fc2: Tensor
) -> Tensor:
    """The same layer without quantization: weights [E, 2I, H] and [E, H, I] in the dtype of ``x``."""
    routes = _routes(token_selected_experts, fc1.shape[0])
    hidden = _grouped_gemm(x, routes, fc1.shape[1], fc1.__getitem__, gather=True)
    rows = _grouped_gemm(swiglu(hidden), routes, fc2.shape[1], fc2.__getitem__)
    return finalize_ordered(rows, routes.order, token_final_scales, torch.empty_like(x))


def calibrate(x: Tensor, token_selected_experts: Tensor, fc1: Tensor) -> tuple[Tensor, Tensor]:
    """Global scales (a1, a2) of the two GEMMs' inputs, from tokens like those to come and the dense fc1."""
    routes = _routes(token_selected_experts, fc1.shape[0])
    hidden = _grouped_gemm(x, routes, fc1.shape[1], fc1.__getitem__, gather=True)
    return nvfp4.global_scale(x), nvfp4.global_scale(swiglu(hidden))


def swiglu(hidden: Tensor) -> Tensor:
    """``silu(gate) * up`` of [..., up; gate] in float32 or wider, rounded to the dtype of ``hidden``."""
    wide = hidden.float() if hidden.dtype.itemsize < 4 else hidden
    up, gate = wide.chunk(2, dim=-1)
    return (silu(gate) * up).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class _Routes:
    """(token, slot) pairs grouped by expert.

    ``order``: index into the flattened [T, k] of each row; ``token`` and ``expert``: its token and expert;
    rows ``bounds[e]`` to ``bounds[e + 1]`` belong to expert e.
    """

    order: Tensor
    token: Tensor
    bounds: list[int]
    expert: Tensor


def _routes(experts: Tensor, num_experts: int) -> _Routes:
    grouped, order = experts.flatten().sort(stable=True)
    edges = torch.arange(num_experts + 1, dtype=grouped.dtype, device=grouped.device)
    bounds: list[int] = torch.searchsorted(grouped, edges).tolist()
    if bounds[0] != 0 or bounds[-1] != grouped.numel():
        raise UsageError(
            f"token_selected_experts holds experts outside 0..{num_experts - 1}; route among those"
        )
    return _Routes(order, order // experts.shape[-1], bounds, grouped)


@dataclass(frozen=True, slots=True)
class _Gemm:
    """The quantized side of one GEMM: expert weights, and the global scale of the activations it is given."""

    weight: Tensor
    scale: Tensor
    weight_global: Tensor
    activation_global: Tensor

    def quantized(self, x: Tensor) -> Tensor:
        """``x`` as the GEMM sees it: E2M1 times E4M3, exact in float32, without the global scale."""
        return nvfp4.scale_blocks(*nvfp4.quantize_values(x, self.activation_global.reshape(())))

    def experts(self, some: slice) -> Tensor:
        """Weights of some experts as the GEMM sees them, [n, N, K]."""
        packed = self.weight[some]
        scales = unswizzle(self.scale[some], packed.shape[1], packed.shape[2] * 2 // nvfp4.BLOCK)
        return nvfp4.dequantize(packed, scales)

    def alphas(self) -> Tensor:
        """What the epilogue multiplies each expert's products by, float32 [E]."""
        return 1.0 / (self.activation_global.reshape(()) * self.weight_global)


def _expert_rows(x: Tensor, routes: _Routes, first: _Gemm, second: _Gemm, compute: torch.dtype) -> Tensor:
    """Output rows [T * k, H] in the order of ``routes``, before the finalize; in ``compute`` precision."""
    hidden = _quantized_gemm(x, routes, first, compute, gather=True)
    if compute is torch.float32:
        hidden = hidden.to(x.dtype)
    return _quantized_gemm(swiglu(hidden), routes, second, compute)


def _quantized_gemm(
    x: Tensor, routes: _Routes, gemm: _Gemm, compute: torch.dtype, *, gather: bool = False
) -> Tensor:
    rows = gemm.quantized(x).to(compute)
    products = _grouped_gemm(
        rows, routes, gemm.weight.shape[1], lambda some: gemm.experts(some).to(compute), gather
    )
    return products.mul_(gemm.alphas()[routes.expert].unsqueeze(-1))


def _grouped_gemm(
    rows: Tensor, routes: _Routes, columns: int, weights: Callable[[slice], Tensor], gather: bool = False
) -> Tensor:
    """``rows @ weight[e].T`` for each expert's rows: [T * k, columns] in the dtype of ``rows``.

    Args:
        rows: [T * k, K] grouped by expert; with ``gather`` [T, K], from which each expert takes its tokens.
        weights: [n, columns, K] of a range of experts; asked only of ranges that have rows.
    """
    products = rows.new_empty(routes.order.numel(), columns)
    # Small experts are dequantized several at a time, large ones alone: not all should lie in memory at once.
    group = max(1, _GROUP_ELEMENTS // (columns * rows.shape[1]))
    for first in range(0, len(routes.bounds) - 1, group):
        bounds = routes.bounds[first : first + group + 1]
        if bounds[0] == bounds[-1]:
            continue
        some = weights(slice(first, first + group))
        for weight, (start, stop) in zip(some, itertools.pairwise(bounds), strict=True):
            operand = rows[routes.token[start:stop]] if gather else rows[start:stop]
            torch.mm(operand, weight.T, out=products[start:stop])
    return products


class NVFP4Experts(nn.Module):
    """The experts of one layer. Its call is one call of `reference_moe`, in the layouts given there."""

    def __init__(
        self,
        fc1: Tensor,
        fc2: Tensor,
        a1_global: Tensor,
        a2_global: Tensor,
        *,
        finalize: Finalize = "atomic",
        accumulate: Accumulate = "fp32",
    ) -> None:
        """Quantize dense weights.

        Args:
            fc1: [E, 2I, H], rows up (w3) then gate (w1), floating.
            fc2: [E, H, I].
            a1_global, a2_global: float32 0-d, as `calibrate` returns them.
        """
        super().__init__()
        check_modes(finalize, accumulate)
        self.finalize: Finalize = finalize
        self.accumulate: Accumulate = accumulate
        self.fc1_weight, self.fc1_scale, self.fc1_global = _quantize_experts(fc1)
        self.fc2_weight, self.fc2_scale, self.fc2_global = _quantize_experts(fc2)
        self.a1_global = _frozen(a1_global)
        self.a2_global = _frozen(a2_global)

    def forward(self, x: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor) -> Tensor:
        return reference_moe(
            x,
            token_selected_experts,
            token_final_scales,
            self.fc1_weight,
            self.fc1_scale,
            self.fc1_global,
            self.fc2_weight,
            self.fc2_scale,
            self.fc2_global,
            self.a1_global,
            self.a2_global,
            finalize=self.finalize,
            accumulate=self.accumulate,
        )


class NVFP4MoE(nn.Module):
    """Router and experts; [..., H] to [..., H]."""

    def __init__(self, gate: Router, experts: NVFP4Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        selected, scales = self.gate(tokens)
        out: Tensor = self.experts(tokens, selected, scales)
        return out.view(x.shape)


def _quantize_experts(weight: Tensor) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """(packed, swizzled scales, global scales) of [E, N, K]."""
    scale = torch.stack([nvfp4.global_scale(expert) for expert in weight])
    packed, scales = nvfp4.quantize(weight, scale.view(-1, 1, 1))
    return _frozen(packed), _frozen(swizzle(scales)), _frozen(scale)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
