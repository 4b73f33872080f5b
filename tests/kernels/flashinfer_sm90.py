"""FlashInfer's own Python over a compiled module that is made up, on the CPU.

Everything from ``cutlass_fused_moe`` down to the call of the compiled runner is the installed FlashInfer: its
signature, its autotuner with its cache, its runner class. Below that, where the CUDA module would be, is
`CompiledRunner`: a few tactics, of which some finalize "fused": they add rounded terms in a random order.
It shows that the backend asks, pins, tunes and reports what it should. That a real kernel varies, only
tests/gpu can show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from detaudit.kernels import flashinfer_cutlass, flashinfer_graph
from detaudit.kernels.backend import Available
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass
from detaudit.kernels.flashinfer_synthetic import synthetic_case
from detaudit.kernels.shapes import Shape, Synthetic

GEMM1 = 3
UNFUSED = ("none", "none", "none")
FUSED = ("none", "none", "FINALIZE", "FINALIZE", "none")
"""GEMM2 tactics with ``use_fused_finalize``, in an order as on SM90: the fused ones lie in between."""
FIRST_FUSED = GEMM1 + FUSED.index("FINALIZE")
FASTEST = FIRST_FUSED + 1
"""The GEMM2 tactic that the autotuner finds the fastest where it exists."""

SHAPE = Shape("tiny", experts=8, top_k=4, hidden=64, intermediate=32)


class Machine:
    """What was launched. ``fuses``: whether the module has fused tactics at all."""

    def __init__(self, *, fuses: bool = True) -> None:
        self.fuses = fuses
        self.launched: list[dict[str, Any]] = []
        self.random = random.Random(0)

    def kernel_names(self, work: Callable[[], Tensor]) -> list[str]:
        work()
        finalize = "_ZN12tensorrt_llm24finalizeMoeRoutingKernel"
        return [
            "_ZN7cutlass13device_kernel",
            *([] if self.launched.pop()["kind"] == "FINALIZE" else [finalize]),
        ]


class CompiledRunner:
    """Stands for the compiled ``FusedMoeRunner``; arguments in the order of FlashInfer's binding."""

    def __init__(self, machine: Machine, fused: bool) -> None:
        self._machine = machine
        self._kinds = FUSED if fused and machine.fuses else UNFUSED

    def get_gemm1_tactic_count(self) -> int:
        return GEMM1

    def get_gemm2_tactic_count(self) -> int:
        return len(self._kinds)

    def get_tactic_occupancy(self, tactic: int) -> int:
        return 1

    def get_workspace_size(self, *_: object) -> int:
        return 1000

    def run_gemm_profile(self, *_: object) -> None:
        """The times are made up as well."""

    def run_moe(self, output: Tensor, x: Tensor, selected: Tensor, scales: Tensor, *rest: Any) -> None:
        fc1, _, fc2 = rest[0], rest[1], rest[2]
        profile = next(item for item in rest if isinstance(item, list) and len(item) == 2)
        workspace = next((t for t in rest if isinstance(t, Tensor) and t.dtype == torch.uint8), None)
        gemm2 = 0 if profile[1] == -1 else profile[1] - GEMM1
        if not 0 <= gemm2 < len(self._kinds):
            raise RuntimeError(f"Invalid gemm2 profile id: {profile[1]}")
        kind = self._kinds[gemm2]
        self._machine.launched.append({"profile": profile, "kind": kind, "workspace": workspace})
        terms = [
            [
                scales[t, k] * _expert(x[t], fc1[selected[t, k]], fc2[selected[t, k]])
                for k in range(scales.shape[1])
            ]
            for t in range(x.shape[0])
        ]
        for token, row in enumerate(terms):
            output[token] = self._finalize(row, kind, output.dtype)

    def _finalize(self, row: Sequence[Tensor], kind: str, dtype: torch.dtype) -> Tensor:
        if kind == "none":
            return torch.stack(list(row)).float().sum(0).to(dtype)
        total = torch.zeros_like(row[0], dtype=dtype)
        for term in self._machine.random.sample(list(row), len(row)):
            total = total + term.to(dtype)
        return total


def _expert(x: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    up, gate = (fc1.float() @ x.float()).chunk(2)
    return fc2.float() @ (torch.nn.functional.silu(gate) * up)


def _time(_self: object, _runner: object, _inputs: object, tactic: int, *_: object, **__: object) -> float:
    return 0.5 if tactic == FASTEST else 1.0 + tactic / 1000


@contextmanager
def as_compiled(init: Callable[..., object], capability: tuple[int, int]) -> Iterator[pytest.MonkeyPatch]:
    """FlashInfer on a CPU that it takes for a GPU of ``capability``; ``init`` makes the compiled runner."""
    core = pytest.importorskip("flashinfer.fused_moe.core", exc_type=ImportError)
    module = SimpleNamespace(
        set_deepgemm_jit_include_dirs=lambda _dirs: None,
        interleave_moe_weights_for_sm90_mixed_gemm=None,
        init=init,
    )
    generated = SimpleNamespace(build_and_load=lambda: module)
    core.get_cutlass_fused_moe_module.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            core, f"gen_cutlass_fused_moe_sm{capability[0]}{capability[1]}_module", lambda *_: generated
        )
        patch.setattr(core, "get_compute_capability", lambda _device: capability)
        patch.setattr(core, "device_support_pdl", lambda _device: True)
        patch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield patch
    core.get_cutlass_fused_moe_module.cache_clear()


@contextmanager
def compiled(machine: Machine) -> Iterator[FlashInferCutlass]:
    """The backend on an SM90 with ``machine`` as its compiled module."""
    tuner = pytest.importorskip("flashinfer.autotuner", exc_type=ImportError).AutoTuner
    with as_compiled(lambda *args: CompiledRunner(machine, args[7]), (9, 0)) as patch:
        patch.setattr(tuner, "_profile_single_kernel", _time)
        patch.setattr(tuner, "_instance", None)
        patch.setattr(flashinfer_cutlass, "_sm", lambda _device: 90)
        patch.setattr(FlashInferCutlass, "_here", lambda _self, _weights: Available(torch.device("cpu")))
        patch.setattr(flashinfer_graph, "kernel_names", machine.kernel_names)
        patch.setattr(flashinfer_graph, "Replay", lambda work: work)
        patch.setattr("flashinfer.fused_moe.cutlass_fused_moe_workspace_size", lambda **_: 1000)
        yield FlashInferCutlass()


def tiny_case(tokens: int = 6, dtype: str = "bf16", shape: Shape = SHAPE) -> Case:
    return synthetic_case(Synthetic(shape, tokens, dtype), torch.device("cpu"))
