"""FlashInfer's mixture-of-experts kernels: on which GPUs each runs, and where it can fuse the finalize.

Read in the sources of flashinfer-python 0.6.16 to 0.7.4; NVFP4, bf16 and fp8 on SM90 were tried on an H200.
Plain data; never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Finalize = Literal["fused", "separate", "atomics"]
"""``fused``: can be fused, with a switch. ``separate``: a kernel of its own, in a fixed order. ``atomics``:
added up in no fixed order, with no switch."""

OLDEST = (0, 6, 15)
"""The first release whose ``cutlass_fused_moe`` has ``use_fused_finalize``."""
NEWEST = (0, 7, 4)
"""The newest release that was read."""

_BLACKWELL = (100, 103, 107, 110, 120, 121)
_FUSING = (90, 100, 103, 107, 110)


@dataclass(frozen=True, slots=True)
class MoeKernel:
    """A kernel of FlashInfer.

    Args:
        entry: the function.
        weights: what it multiplies.
        sms: compute capabilities it runs on, as 10 * major + minor.
        fused: of these, where the fused finalize can be taken at all.
        finalize: how the expert outputs are added up.
        since: the first release that has it, as far as it matters.
    """

    entry: str
    weights: str
    sms: tuple[int, ...]
    fused: tuple[int, ...]
    finalize: Finalize
    since: tuple[int, ...] = OLDEST

    @property
    def name(self) -> str:
        return f"{self.entry} {self.weights}"


_CUTLASS = "cutlass_fused_moe"
KERNELS: tuple[MoeKernel, ...] = (
    MoeKernel(_CUTLASS, "NVFP4", _BLACKWELL, _BLACKWELL, "fused"),
    MoeKernel(_CUTLASS, "bf16", (89, 90, *_BLACKWELL), _FUSING, "fused"),
    MoeKernel(_CUTLASS, "fp16", (89, 90, *_BLACKWELL), _FUSING, "fused"),
    MoeKernel(_CUTLASS, "fp8 per tensor", (89, 90, *_BLACKWELL), _FUSING, "fused"),
    MoeKernel(_CUTLASS, "fp8 block scale", (90,), (), "separate"),
    MoeKernel(_CUTLASS, "W4A16 MXFP4", (90,), (), "separate"),
    MoeKernel(_CUTLASS, "W4A8 int4", (90,), (), "separate"),
    MoeKernel("cute_dsl_fused_moe_nvfp4", "NVFP4", (100, 103, 107), (100, 103, 107), "fused"),
    MoeKernel("cute_dsl_fused_moe_bf16", "bf16", (90,), (90,), "fused", (0, 7, 0)),
    MoeKernel("b12x_fused_moe", "NVFP4", (120, 121), (), "atomics"),
    MoeKernel("trtllm_fp4_block_scale_moe", "NVFP4", (100, 103, 107, 120, 121), (), "separate"),
)


def why_not(kernel: MoeKernel, sm: int | None, flashinfer: Sequence[int] | None) -> str | None:
    """Why ``kernel`` cannot run on a GPU of capability ``sm`` with this release; ``None`` if it can."""
    if flashinfer is None:
        return "FlashInfer is not installed"
    if tuple(flashinfer) < kernel.since:
        return f"needs FlashInfer {'.'.join(map(str, kernel.since))} or newer"
    if sm is None:
        return f"no GPU; runs on {sm_list(kernel.sms)}"
    if sm not in kernel.sms:
        return f"not on SM{sm}; runs on {sm_list(kernel.sms)}"
    return None


def finalize_on(kernel: MoeKernel, sm: int) -> str:
    """What becomes of the finalize where the kernel runs, in a sentence part."""
    if kernel.finalize == "atomics":
        return "adds with atomics in no fixed order, and has no switch"
    if kernel.finalize == "separate" or sm not in kernel.fused:
        return "finalize is never fused here, whatever use_fused_finalize says"
    if kernel.entry == _CUTLASS:
        return "fused finalize can be taken once autotuned; use_fused_finalize=False rules it out"
    return "fused finalize is the default, tuned or not; use_fused_finalize=False rules it out"


def module_of(sm: int) -> str | None:
    """The architecture in the name of the CUTLASS MoE module that serves ``sm`` (``fused_moe_90``)."""
    return {89: "89", 90: "90", 103: "103", 120: "120", 121: "120"}.get(
        sm, "100" if 100 <= sm < 120 else None
    )


def sm_list(sms: Sequence[int]) -> str:
    """``SM90, SM100``."""
    return ", ".join(f"SM{sm}" for sm in sms)
