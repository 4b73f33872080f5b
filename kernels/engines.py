"""Where FlashInfer's fused finalize is switched off: its own argument, and the engines that call it.

Engines are looked into, not imported: a switch counts as there if the installed engine's own source names it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from detaudit.kernels.backend import Guidance


@dataclass(frozen=True, slots=True)
class Switch:
    """An engine's switch.

    Args:
        distribution, package: what it installs as, and what it is imported as.
        source: the file inside the package that names the switch where it exists.
        marker: the name to look for in it.
        setting: what to set.
        since: where the switch first appeared, as a sentence part.
    """

    distribution: str
    package: str
    source: str
    marker: str
    setting: str
    since: str


SWITCHES = {
    "vllm": Switch(
        distribution="vllm",
        package="vllm",
        source="envs.py",
        marker="VLLM_FLASHINFER_MOE_FUSED_FINALIZE",
        setting="VLLM_FLASHINFER_MOE_FUSED_FINALIZE=0",
        since="pull request #54948 of vLLM, not in 0.33.0",
    ),
    "sglang": Switch(
        distribution="sglang",
        package="sglang",
        source="srt/environ.py",
        marker="SGLANG_FLASHINFER_MOE_FUSED_FINALIZE",
        setting=(
            "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=0 (the default; --enable-deterministic-inference forces it)"
        ),
        since="pull request #40105 of SGLang",
    ),
    "tensorrt_llm": Switch(
        distribution="tensorrt-llm",
        package="tensorrt_llm",
        source="llmapi/llm_args.py",
        marker="disable_finalize_fusion",
        setting="moe_config.disable_finalize_fusion: true",
        since="the MoeConfig of its LLM API",
    ),
}

CACHE_FIXED = (0, 6, 18)


def finalize_guidance(installed: Callable[[str], str | None] | None = None) -> Guidance:
    """How to rule the fused finalize out. ``installed``: version of a distribution, ``None`` if absent."""
    version_of = installed or installed_version
    flashinfer = version_of("flashinfer-python")
    fault = autotune_cache_fault(flashinfer) if flashinfer else None
    engines = {key: _describe(switch, version_of(switch.distribution)) for key, switch in SWITCHES.items()}
    return Guidance(
        where={"flashinfer": "cutlass_fused_moe(..., use_fused_finalize=False)"} | engines,
        warnings=(fault,) if fault else (),
    )


def autotune_cache_fault(flashinfer: str) -> str | None:
    """The warning about tuning caches that ``flashinfer``, a version, deserves; ``None`` from 0.6.18 on.

    Up to 0.6.17 the key of a tuned entry on disk lacks ``use_fused_finalize``.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", flashinfer)[:3])
    if numbers >= CACHE_FIXED:
        return None
    return (
        f"FlashInfer {flashinfer} does not keep use_fused_finalize in its autotune cache: one tuned with the "
        'other value fails with "Invalid gemm2 profile id" or picks another tactic silently; start from an '
        "empty cache (fixed in 0.6.18)"
    )


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _describe(switch: Switch, version: str | None) -> str:
    if version is None:
        return f"not installed; the switch is {switch.setting}, since {switch.since}"
    if _names_switch(switch):
        return f"{switch.setting} ({switch.distribution} {version})"
    return (
        f"{switch.distribution} {version} has no switch; it came with {switch.since}: "
        "set the argument where the engine calls FlashInfer"
    )


def _names_switch(switch: Switch) -> bool:
    try:
        spec = importlib.util.find_spec(switch.package)
        folders = spec.submodule_search_locations if spec else None
        return any(
            switch.marker in (Path(folder) / switch.source).read_text(encoding="utf-8", errors="replace")
            for folder in folders or ()
        )
    except (OSError, ImportError, ValueError):
        return False
