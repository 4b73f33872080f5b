"""Reports made by hand, one for each kind of answer: what the reporters and the commands are tested on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detaudit.core.records import (
    Condition,
    Finding,
    KernelReport,
    Origin,
    Rate,
    Report,
    VariantResult,
)

ENVIRONMENT: Mapping[str, Any] = {
    "torch": "2.13.0",
    "python": "3.11.7",
    "gpu": {"name": "NVIDIA B200", "sm": 100},
    "flags": {"float32_matmul_precision": "highest", "cudnn.benchmark": False},
}
RESTORED: Mapping[str, Any] = {
    "generators": {
        "python": "put back",
        "numpy": "put back",
        "torch.cpu": "put back",
        "sampler": "not put back: opaque",
    },
    "buffers": {
        "buffers": 12,
        "bytes_on_host": 4096,
        "not_put_back": {"cache.k": "not initialised"},
        "modules_eval": 9,
    },
    "inputs": "made afresh and copied for every run",
    "model": "built once",
}


def modules(layers: int) -> list[dict[str, str]]:
    """A mixture-of-experts decoder's modules, as coverage lists them."""
    found = [("", "Decoder"), ("embed", "Embedding"), ("layers", "ModuleList")]
    for n in range(layers):
        found += [(f"layers.{n}", "DecoderLayer"), (f"layers.{n}.self_attn", "Attention")]
        found += [(f"layers.{n}.self_attn.{p}", "Linear") for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
        found += [(f"layers.{n}.mlp", "MoE"), (f"layers.{n}.mlp.gate", "Linear")]
        found += [(f"layers.{n}.mlp.experts", "NVFP4Experts")]
    found += [("norm", "RMSNorm"), ("lm_head", "Linear")]
    return [{"path": path, "class": cls} for path, cls in found]


def variant(name: str, differing: int, **changes: Any) -> VariantResult:
    values: dict[str, Any] = {
        "name": name,
        "settings": {"use_fused_finalize": "fused" in name.split("-")},
        "tactic": "14",
        "runs": 300,
        "runs_differing": differing,
        "distinct": differing + 1,
        "bound": 1 - 0.05 ** (1 / 300) if not differing else 1.0,
        "max_ulp": 3 if differing else 0,
        "max_abs": 1.2e-7 if differing else 0.0,
        "rel_error": 0.00501 if differing else 0.00384,
        "median_ms": 0.2983 if differing else 0.3038,
        "ratio": 1.0 if differing else 1.018,
    }
    return VariantResult(**(values | changes))


def nondeterministic() -> Report:
    """An origin with everything known, a second one with little known, and a confirmed kernel."""
    first = Origin(
        "layers.0.mlp.experts",
        "NVFP4Experts",
        0,
        "module",
        None,
        ("out",),
        18,
        (*range(42), 57, 60, 61, *range(70, 100, 2)),
        59,
        1024,
        3,
        1.2e-7,
        False,
        None,
        {"1": 1800, "2": 248},
        "aten.index_put_.default",
        "unordered accumulation (index_put_ with accumulate=True)",
        True,
        True,
    )
    second = Origin(
        "layers.3",
        "DecoderLayer",
        1,
        "own-code",
        "layers.3.mlp",
        ("out[0]", "out[1].hidden"),
        4,
        (0,),
        1,
        1,
        numbers_reason="no capture run differed within --capture-bytes",
    )
    kernel = KernelReport(
        "layers.0.mlp.experts-0",
        "layers.0.mlp.experts",
        "flashinfer-cutlass",
        "confirmed",
        "the pinned FINALIZE tactic differs in 300 of 300 runs and use_fused_finalize=False in none.",
        {
            "variant": "unfused",
            "settings": {"use_fused_finalize": False},
            "flashinfer": "cutlass_fused_moe(..., use_fused_finalize=False)",
            "vllm": "VLLM_FLASHINFER_MOE_FUSED_FINALIZE=0 (vllm 0.34.0)",
            "sglang": "SGLANG_FLASHINFER_MOE_FUSED_FINALIZE=0",
            "tensorrt_llm": "not installed; the switch is moe_config.disable_finalize_fusion: true",
            "cost": "1.02 times the median time of the case's own settings",
            "warnings": ["FlashInfer 0.6.17 does not keep use_fused_finalize in its autotune cache"],
        },
        (
            variant("default", 0, tactic="-1 (NONE)"),
            variant("fused-tuned", 287),
            variant("unfused", 0),
            variant("fused-graph", 0, runs=0, reason="CUDA graphs need a newer driver"),
        ),
        "fused, tactic 14 (FINALIZE): 300 of 300 runs differ",
    )
    return Report(
        "nondeterministic",
        20,
        18,
        14,
        0.1,
        Rate(18 / 19, 0.74, 0.9987, 19),
        (first, second),
        (
            Finding(
                "value-equal", "layers.3", "the outputs are equal in value; only the signs of zeros differ."
            ),
            Finding("first-run-differs", None, "the first run | alone <differs>."),
        ),
        (kernel,),
        (
            Condition("in-process", 20, 18, "nondeterministic"),
            Condition("hooks-off", 4, 3, "nondeterministic"),
        ),
        {"runs_on": 20, "runs_off": 4, "differing_on": 18, "differing_off": 3, "p_value": 1.0, "agree": True},
        RESTORED,
        {
            "modules": modules(24),
            "calls": 219,
            "modules_called": 219,
            "history": {"positions": 20, "differing": 19},
            "unobserved": [["layers.1.self_attn", "out[1]", "nested layout", 20]],
        },
        ENVIRONMENT,
        "examples/nvfp4_moe.py",
        "nvfp4_moe.detaudit",
    )


def deterministic() -> Report:
    return Report(
        "deterministic",
        20,
        0,
        1,
        1.0,
        Rate(0.0, 0.0, 1 - 0.05 ** (1 / 19), 19),
        conditions=(
            Condition("in-process", 20, 0, "deterministic"),
            Condition("hooks-off", 4, 0, "deterministic"),
        ),
        kernels=(
            KernelReport(
                "experts-0",
                "layers.0.mlp.experts",
                "flashinfer-cutlass",
                "vacuous-control",
                "top_k is 2: two rounded terms commute, so the fused finalize could not have differed.",
                None,
                (
                    variant(
                        "default", 0, tactic=None, max_ulp=None, rel_error=None, median_ms=None, ratio=None
                    ),
                ),
            ),
        ),
        observer={
            "runs_on": 20,
            "runs_off": 4,
            "differing_on": 0,
            "differing_off": 0,
            "p_value": 1.0,
            "agree": True,
        },
        restored={"generators": {"python": "put back", "torch.cpu": "put back"}},
        coverage={"modules": modules(2)},
        target="model.py",
        trace="model.detaudit",
    )


def inconclusive() -> Report:
    return Report(
        "inconclusive",
        20,
        0,
        0,
        0.0,
        Rate(None, 0.0, 1.0, 0),
        findings=(
            Finding("inputs-differ", None, "make_inputs() gave other tensors in run 1 than in run 0."),
        ),
        conditions=(Condition("in-process", 20, 0, "inconclusive"),),
        coverage={
            "reason": "the inputs differ between runs",
            "excluded": ["embed"],
            "modules_called": 12,
            "unobserved": [{"module": f"block.{n}", "site": "out", "reason": "opaque"} for n in range(12)],
        },
        target="model.py",
        trace="model.detaudit",
    )


def masked() -> Report:
    origin = Origin("", "Net", 0, "own-code", None, ("out",), 7, (1, 3), 2, 8, 1, 5.9e-8, False)
    return Report(
        "nondeterministic",
        20,
        7,
        1,
        1.0,
        Rate(7 / 19, 0.163, 0.617, 19),
        (origin,),
        (Finding("masked", "", "a module differs and the final output agrees."),),
        conditions=(Condition("in-process", 20, 7, "nondeterministic"),),
        coverage={"modules": [{"path": "", "class": "Net"}]},
        target="net.py",
        trace="net.detaudit",
    )


def unobserved_producer() -> Report:
    return Report(
        "nondeterministic",
        20,
        19,
        20,
        0.05,
        Rate(1.0, 0.824, 1.0, 19),
        findings=(
            Finding(
                "unobserved-producer",
                "head",
                "something between encoder call 0 and head call 0 made the difference.",
            ),
        ),
        conditions=(Condition("fresh-process", 20, 19, "nondeterministic"),),
        observer={"skipped": "--no-observer"},
        target="script.py",
        trace="script.detaudit",
    )


ALL = {
    "nondeterministic": nondeterministic,
    "deterministic": deterministic,
    "inconclusive": inconclusive,
    "masked": masked,
    "unobserved_producer": unobserved_producer,
}
