"""Synthetic calls of ``cutlass_fused_moe``: the tensors a layer of a given shape would be called with.

The layouts are those FlashInfer checks (its ``flashinfer_cutlass_fused_moe_binding.cu``) and its wrapper
documents. fc1 holds each expert's rows up (w3), then gate (w1). Weights and tokens are normal with a fixed
seed, made where they will be used, one expert at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from detaudit.core.errors import Unsupported, UsageError
from detaudit.kernels import nvfp4
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_call import ENTRIES, weights_of
from detaudit.kernels.reference import calibrate
from detaudit.kernels.routing import synthetic_routing
from detaudit.kernels.shapes import Shape, Synthetic
from detaudit.kernels.swizzle import padded_shape, swizzle

WEIGHTS = {"nvfp4": "NVFP4", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8 per tensor"}
"""``--dtype`` to the name in ``kernels.support``."""

_E4M3_MAX = 448.0

Tensors = dict[str, Tensor]


def weights_asked(wanted: Synthetic) -> str:
    """Raises UsageError for a dtype this kernel does not have."""
    try:
        return WEIGHTS[wanted.dtype]
    except KeyError as error:
        raise UsageError(
            f"cutlass_fused_moe has no {wanted.dtype} weights; choose one of {', '.join(WEIGHTS)}"
        ) from error


def synthetic_case(wanted: Synthetic, device: torch.device) -> Case:
    """The call, with ``use_fused_finalize`` left at the release's default and nothing tuned.

    Raises:
        UsageError: a size that the dtype cannot hold.
    """
    make: Callable[[Synthetic, torch.Generator], Tensors] = {
        "nvfp4": _nvfp4,
        "bf16": _plain,
        "fp16": _plain,
        "fp8": _fp8,
    }[wanted.dtype]
    _check(wanted)
    shape = wanted.shape
    experts, scales = synthetic_routing(
        wanted.routing, wanted.tokens, shape.experts, shape.top_k, seed=wanted.seed
    )
    generator = torch.Generator(device).manual_seed(wanted.seed)
    tensors = make(wanted, generator)
    routed = {"token_selected_experts": experts.to(device), "token_final_scales": scales.to(device)}
    return Case(
        name=wanted.name,
        entry=ENTRIES[0],
        tensors={"input": tensors.pop("input"), **routed, **tensors},
        parameters={"output_dtype": "float16" if wanted.dtype == "fp16" else "bfloat16"}
        | ({"quant_scales": []} if "quant_scales[0]" not in tensors else {}),
        context={"device": str(device), "synthetic": True},
    )


def quantize_input(case: Case) -> Case:
    """The same NVFP4 case with its tokens quantized by the caller: packed E2M1 and swizzled E4M3 scales."""
    if weights_of(case) != "NVFP4" or "input_sf" in case.tensors:
        raise Unsupported(f"{case.name} has no input that could be quantized to NVFP4")
    packed, scales = nvfp4.quantize(case.tensors["input"], case.tensors["quant_scales[0]"])
    tensors = {**case.tensors, "input": packed, "input_sf": swizzle(scales)}
    return dataclasses.replace(case, name=f"{case.name}, quantized input", tensors=tensors)


def _check(wanted: Synthetic) -> None:
    # TMA moves 16 bytes at least along K, of either operand.
    step = {"nvfp4": 32, "fp8": 16}.get(wanted.dtype, 8)
    for name, size in (("hidden", wanted.shape.hidden), ("intermediate", wanted.shape.intermediate)):
        if size % step:
            raise UsageError(f"{wanted.dtype} needs a {name} size that {step} divides, but it is {size}")


def _dense(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, columns] of variance 1 / columns, so that activations keep their size."""
    weight = torch.randn(rows, columns, generator=generator, device=generator.device)
    return weight.mul_(columns**-0.5)


def _tokens(wanted: Synthetic, generator: torch.Generator) -> Tensor:
    return torch.randn(wanted.tokens, wanted.shape.hidden, generator=generator, device=generator.device)


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device, per_element: int = 1) -> Tensors:
    experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    return {
        "fc1_expert_weights": torch.empty(
            experts, 2 * inner, hidden // per_element, dtype=dtype, device=device
        ),
        "fc2_expert_weights": torch.empty(experts, hidden, inner // per_element, dtype=dtype, device=device),
    }


def _plain(wanted: Synthetic, generator: torch.Generator) -> Tensors:
    dtype = torch.float16 if wanted.dtype == "fp16" else torch.bfloat16
    shape = wanted.shape
    tensors = {"input": _tokens(wanted, generator).to(dtype)} | _empty(shape, dtype, generator.device)
    for expert in range(shape.experts):
        tensors["fc1_expert_weights"][expert] = _dense(2 * shape.intermediate, shape.hidden, generator)
        tensors["fc2_expert_weights"][expert] = _dense(shape.hidden, shape.intermediate, generator)
    return tensors


def _fp8(wanted: Synthetic, generator: torch.Generator) -> Tensors:
    """One scale per expert and GEMM; the second GEMM's input is calibrated on the first expert."""
    shape, device = wanted.shape, generator.device
    tokens = _tokens(wanted, generator)
    x, x_scale = _to_fp8(tokens)
    tensors = {"input": x} | _empty(shape, torch.float8_e4m3fn, device)
    scales = torch.empty(2, shape.experts, device=device)
    hidden_scale = torch.ones((), device=device)
    for expert in range(shape.experts):
        fc1 = _dense(2 * shape.intermediate, shape.hidden, generator)
        if expert == 0:
            hidden_scale = _swiglu(tokens @ fc1.T).abs().amax() / _E4M3_MAX
        for index, (name, weight) in enumerate(
            (
                ("fc1_expert_weights", fc1),
                ("fc2_expert_weights", _dense(shape.hidden, shape.intermediate, generator)),
            )
        ):
            tensors[name][expert], scales[index, expert] = _to_fp8(weight)
    quant = (x_scale * scales[0], 1 / hidden_scale, hidden_scale * scales[1], x_scale)
    return tensors | {f"quant_scales[{i}]": scale for i, scale in enumerate(quant)}


def _to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax() / _E4M3_MAX
    return (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def _swiglu(hidden: Tensor) -> Tensor:
    up, gate = hidden.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _nvfp4(wanted: Synthetic, generator: torch.Generator) -> Tensors:
    """Six scales: of the first input, fc1's blocks, 1 / (input scale * fc1's) [E]; the same for fc2."""
    shape, device = wanted.shape, generator.device
    x = _tokens(wanted, generator).to(torch.bfloat16)
    first = torch.zeros(wanted.tokens, 1, dtype=torch.int32, device=device)
    tensors = {"input": x} | _empty(shape, torch.int64, device, per_element=16)
    fc1_scales = _scale_blocks(shape.experts, 2 * shape.intermediate, shape.hidden, device)
    fc2_scales = _scale_blocks(shape.experts, shape.hidden, shape.intermediate, device)
    globals_ = torch.empty(2, shape.experts, device=device)
    a1 = a2 = torch.ones((), device=device)
    for expert in range(shape.experts):
        fc1 = _dense(2 * shape.intermediate, shape.hidden, generator).to(torch.bfloat16)
        fc2 = _dense(shape.hidden, shape.intermediate, generator).to(torch.bfloat16)
        if expert == 0:
            a1, a2 = calibrate(x, first, fc1.unsqueeze(0))
        for index, (name, weight, blocks) in enumerate(
            (("fc1_expert_weights", fc1, fc1_scales), ("fc2_expert_weights", fc2, fc2_scales))
        ):
            globals_[index, expert] = nvfp4.global_scale(weight)
            packed, scales = nvfp4.quantize(weight, globals_[index, expert])
            tensors[name][expert] = packed.view(torch.int64)
            blocks[expert] = swizzle(scales).view(torch.int32)
    quant = (a1, fc1_scales, 1 / (a1 * globals_[0]), a2, fc2_scales, 1 / (a2 * globals_[1]))
    return tensors | {f"quant_scales[{i}]": scale for i, scale in enumerate(quant)}


def _scale_blocks(experts: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """int32 [E, padded rows, padded columns / 16 / 4]: four E4M3 scales an element."""
    full_rows, full_columns = padded_shape(rows, columns // nvfp4.BLOCK)
    return torch.empty(experts, full_rows, full_columns // 4, dtype=torch.int32, device=device)
