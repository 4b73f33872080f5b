"""What to note about FlashInfer with a call of its kernels. Reads what is loaded, and loads nothing.

The autotuner decides whether a fused finalize can run at all, so a call without its state means little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

CUTLASS_MOE = "flashinfer.fused_moe:cutlass_fused_moe"

FUNCTIONS = (
    CUTLASS_MOE,
    "flashinfer.fused_moe:trtllm_fp4_block_scale_moe",
    "flashinfer.fused_moe:cute_dsl_fused_moe_nvfp4",
    "flashinfer.fused_moe:cute_dsl_fused_moe_bf16",
    "flashinfer.fused_moe:b12x_fused_moe",
    "flashinfer.fused_moe.cute_dsl.blockscaled_contiguous_grouped_gemm_finalize_fusion"
    ":blockscaled_contiguous_grouped_gemm_finalize_fusion_nvfp4",
)
"""Kernels with a finalize step, as entries of ``FunctionTap``."""

_VARIABLES = (
    "FLASHINFER_AUTOTUNE_CACHE_DIR",
    "FLASHINFER_AUTOTUNER_LOAD_FROM_FILE",
    "FLASHINFER_CACHE_DIR",
    "FLASHINFER_TACTICS_BLOCKLIST",
)


def contexts() -> dict[str, Callable[[], Mapping[str, object]]]:
    """``context`` for a ``FunctionTap`` of ``FUNCTIONS``."""
    return dict.fromkeys(FUNCTIONS, autotuner_state)


def autotuner_state() -> dict[str, object]:
    """State of FlashInfer's autotuner, JSON-compatible.

    ``autotuner`` is None where FlashInfer or its tuner is not there yet, otherwise

    - ``tuning``: whether it is measuring right now, so that the call is one of its trials;
    - ``tactics``: chosen tactic by ``operator (shape profile)``, for every operator tuned in this process;
    - ``from_file``: how many choices were loaded from a file.

    Written for FlashInfer 0.6.15 to 0.7.4, whose caches keep ``(..., tactic, profile)`` by a key that
    begins with the operator's name; what a version keeps differently is left out. ``variables`` holds the
    environment variables that change the choice.
    """
    tuner = _tuner()
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if tuner is None:
        return {"autotuner": None, "variables": variables}
    return {
        "autotuner": {
            "tuning": bool(getattr(tuner, "is_tuning_mode", False)),
            "tactics": _tactics(getattr(tuner, "profiling_cache", {})),
            "from_file": len(getattr(tuner, "_file_configs", ())),
        },
        "variables": variables,
    }


def _tuner() -> Any:
    module = sys.modules.get("flashinfer.autotuner")
    # The instance itself, not AutoTuner.get(), which would make one.
    return None if module is None else getattr(vars(module).get("AutoTuner"), "_instance", None)


def _tactics(cache: Mapping[Any, Any]) -> dict[str, object]:
    tactics: dict[str, object] = {}
    for key, chosen in list(cache.items()):
        operator = getattr(key, "custom_op", None) or (key[0] if isinstance(key, tuple) and key else None)
        profile = getattr(key, "nearest_profile", None) or (key[-1] if isinstance(key, tuple) else "")
        if operator is not None and isinstance(chosen, tuple) and len(chosen) >= 2:
            tactic = chosen[-2]
            tactics[f"{operator} {profile}"] = tactic if isinstance(tactic, int) else str(tactic)
    return tactics
