"""Backend ``reference``: the mixture of experts in plain torch, on a CPU or a GPU.

Its atomic finalize is the positive control, its ordered finalize the candidate. It runs cases captured from
the reference itself; a FlashInfer case it runs only when asked for by name, and then reports its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor

from detaudit.core.errors import CaseUnreadable, Unsupported, UsageError
from detaudit.kernels import nvfp4
from detaudit.kernels.backend import (
    Available,
    Fill,
    Guidance,
    Options,
    Poison,
    Prepared,
    Unavailable,
    Variant,
    commutes,
)
from detaudit.kernels.cases import Case
from detaudit.kernels.finalize import Accumulate, Finalize
from detaudit.kernels.reference import NVFP4Experts, calibrate, moe_fp64, reference_moe
from detaudit.kernels.routing import synthetic_routing
from detaudit.kernels.shapes import Synthetic

ENTRY = "detaudit.kernels.reference:reference_moe"
ARGUMENTS = (
    "x",
    "token_selected_experts",
    "token_final_scales",
    "fc1_weight",
    "fc1_scale",
    "fc1_global",
    "fc2_weight",
    "fc2_scale",
    "fc2_global",
    "a1_global",
    "a2_global",
)
SERIAL_ELEMENTS = 32768
"""torch splits an operation over threads from this many elements on (at::internal::GRAIN_SIZE)."""


class ReferenceBackend:
    """``kernels.backend.Backend`` over `reference_moe`."""

    name = "reference"
    sweeps: tuple[str, ...] = ()

    def accepts(self, case: Case) -> bool:
        return case.entry == ENTRY

    def availability(self, case: Case) -> Available | Unavailable:
        try:
            _arguments(case)
        except Unsupported as error:
            return Unavailable(
                str(error), "a case captured from the reference, or NVFP4 with unquantized input"
            )
        return Available(_device(case))

    def cannot_differ(self, case: Case) -> str | None:
        arguments = _arguments(case)
        top_k = arguments["token_selected_experts"].shape[-1]
        if (reason := commutes(top_k)) is not None:
            return reason
        x = arguments["x"]
        if x.is_cuda:
            return None
        if torch.get_num_threads() == 1:
            return "torch runs on one CPU thread, and one thread has one order"
        terms = x.numel() * top_k
        if terms < SERIAL_ELEMENTS:
            return f"the {terms:,} terms are added on one thread, as torch does below {SERIAL_ELEMENTS:,}"
        return None

    def variants(self, case: Case, options: Options) -> Sequence[Variant]:
        finalize, accumulate = _modes(case)
        racy = {"finalize": "atomic", "accumulate": accumulate}
        atomic = Variant("atomic", racy, "control", can_fuse=True, asked=finalize == "atomic")
        ordered = Variant(
            "ordered", {"finalize": "ordered"}, "candidate", can_fuse=False, asked=finalize == "ordered"
        )
        return (atomic, ordered) if atomic.asked else (ordered, atomic)

    def prepare(self, case: Case, variant: Variant) -> Prepared:
        return _Prepared(_arguments(case), variant.settings)

    def reference_fp64(self, case: Case) -> Tensor | None:
        return moe_fp64(**_arguments(case))

    def guidance(self, case: Case, variant: Variant) -> Guidance:
        return Guidance({"reference": f'reference_moe(..., finalize="{variant.settings["finalize"]}")'})

    def synthetic(self, wanted: Synthetic) -> Case | Unavailable:
        if wanted.dtype != "nvfp4":
            raise UsageError(
                f"the reference backend computes in nvfp4, not {wanted.dtype}; pass --dtype nvfp4"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Case(
            name=wanted.name,
            entry=ENTRY,
            tensors=_synthetic_tensors(wanted, device),
            parameters={"finalize": "atomic", "accumulate": "fp32"},
            context={"device": str(device), "synthetic": True},
        )


class _Prepared:
    """``kernels.backend.Prepared``; the output is the only buffer that a caller could have left dirty."""

    def __init__(self, arguments: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._finalize: Finalize = settings["finalize"]
        self._accumulate: Accumulate = settings.get("accumulate", "fp32")
        self._out = torch.empty_like(arguments["x"], memory_format=torch.contiguous_format)
        self._poison = Poison(self._out)

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def poison(self, fill: Fill) -> None:
        self._poison(fill)

    def run(self) -> Tensor:
        return reference_moe(
            **self._arguments, finalize=self._finalize, accumulate=self._accumulate, out=self._out
        )

    def tactic(self) -> str | None:
        if self._finalize == "ordered":
            return "in the order of k"
        return "index_add_, atomics" if self._out.is_cuda else "index_put_, threads"

    def fused(self) -> bool | None:
        return self._finalize == "atomic"


def _device(case: Case) -> torch.device:
    """Where the call happened, if that is to be had; else the CPU, which can run all of it."""
    captured = torch.device(case.context.get("device", str(case.device)))
    return captured if captured.type == "cuda" and torch.cuda.is_available() else torch.device("cpu")


def _modes(case: Case) -> tuple[Finalize, Accumulate]:
    """The case's own settings. A FlashInfer case has none of these names; its question is the atomic one."""
    finalize = case.parameters.get("finalize", "atomic")
    accumulate = case.parameters.get("accumulate", "fp32")
    if finalize not in get_args(Finalize) or accumulate not in get_args(Accumulate):
        raise CaseUnreadable(
            f"case {case.name} has finalize {finalize!r} and accumulate {accumulate!r}; capture again"
        )
    return finalize, accumulate


def _arguments(case: Case) -> dict[str, Tensor]:
    """Tensors by `reference_moe`'s argument names. Raises Unsupported where the case does not have them."""
    tensors = case.tensors if case.entry == ENTRY else _from_flashinfer(case)
    missing = [name for name in ARGUMENTS if name not in tensors]
    if missing:
        raise Unsupported(f"case {case.name} has no {', '.join(missing)}")
    return {name: tensors[name] for name in ARGUMENTS}


def _from_flashinfer(case: Case) -> dict[str, Tensor]:
    """The arguments of an NVFP4 ``cutlass_fused_moe``: the same layouts, viewed there as wider integers."""
    tensors, scales = case.tensors, case.group("quant_scales")
    extra = {
        "input_sf",
        "fc1_expert_biases",
        "fc2_expert_biases",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
    }
    plain = not extra & tensors.keys() and case.parameters.get("ep_size", 1) in (None, 1)
    nvfp4_weights = len(scales) == 6 and "input" in tensors and tensors["input"].dtype.itemsize >= 2
    if not case.entry.endswith(":cutlass_fused_moe") or not plain or not nvfp4_weights:
        raise Unsupported(
            f"the reference computes a plain NVFP4 SwiGLU mixture of experts, which {case.name} is not"
        )
    a1_global, fc1_scale, fc1_alpha, a2_global, fc2_scale, fc2_alpha = scales
    return {
        "x": tensors["input"],
        "token_selected_experts": tensors["token_selected_experts"],
        "token_final_scales": tensors["token_final_scales"],
        "fc1_weight": tensors["fc1_expert_weights"].view(torch.uint8),
        "fc1_scale": fc1_scale.view(torch.uint8),
        "fc1_global": 1.0 / (a1_global.reshape(()) * fc1_alpha),
        "fc2_weight": tensors["fc2_expert_weights"].view(torch.uint8),
        "fc2_scale": fc2_scale.view(torch.uint8),
        "fc2_global": 1.0 / (a2_global.reshape(()) * fc2_alpha),
        "a1_global": a1_global.reshape(()),
        "a2_global": a2_global.reshape(()),
    }


def _synthetic_tensors(wanted: Synthetic, device: torch.device) -> dict[str, Tensor]:
    shape = wanted.shape
    experts, scales = synthetic_routing(
        wanted.routing, wanted.tokens, shape.experts, shape.top_k, seed=wanted.seed
    )
    generator = torch.Generator("cpu").manual_seed(wanted.seed)
    x = torch.randn(wanted.tokens, shape.hidden, generator=generator, device="cpu").bfloat16().to(device)
    first = torch.zeros(wanted.tokens, 1, dtype=torch.int32, device=device)
    layers: list[NVFP4Experts] = []
    a1 = a2 = nvfp4.global_scale(x)
    # One expert at a time: the dense weights of a whole layer would take four times its quantized size.
    for expert in range(shape.experts):
        fc1 = _dense(2 * shape.intermediate, shape.hidden, generator, device)
        fc2 = _dense(shape.hidden, shape.intermediate, generator, device)
        if expert == 0:
            a1, a2 = calibrate(x, first, fc1)
        layers.append(NVFP4Experts(fc1, fc2, a1, a2))
    quantized = ("fc1_weight", "fc1_scale", "fc1_global", "fc2_weight", "fc2_scale", "fc2_global")
    weights = {name: torch.cat([getattr(layer, name).detach() for layer in layers]) for name in quantized}
    routed = {"token_selected_experts": experts.to(device), "token_final_scales": scales.to(device)}
    return {"x": x, **routed, **weights, "a1_global": a1, "a2_global": a2}


def _dense(rows: int, columns: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """[1, rows, columns], normal with variance 1 / columns, so that activations keep their size."""
    weight = torch.randn(1, rows, columns, generator=generator, device="cpu").mul_(columns**-0.5)
    return weight.to(device, torch.bfloat16)
