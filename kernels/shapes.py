"""Shapes of mixture-of-experts layers, and what to make a synthetic case of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from detaudit.core.errors import UsageError
from detaudit.kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer: ``experts`` of which ``top_k`` serve a token, ``hidden`` and ``intermediate`` features."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        # From each model's public config.json: num_experts or n_routed_experts or num_local_experts,
        # num_experts_per_tok, hidden_size, moe_intermediate_size (gpt-oss: intermediate_size).
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("qwen3-next-80b", 512, 10, 2048, 512),
        Shape("deepseek-v3", 256, 8, 7168, 2048),
        Shape("gpt-oss-120b", 128, 4, 2880, 2880),
    )
}


def parse_shape(text: str) -> Shape:
    """A name from ``SHAPES``, or ``E,K,H,I``: experts, top-k, hidden and intermediate size.

    Raises:
        UsageError: neither, or sizes that no layer can have.
    """
    if (named := SHAPES.get(text.lower())) is not None:
        return named
    try:
        experts, top_k, hidden, intermediate = (int(part) for part in text.split(","))
    except ValueError as error:
        known = ", ".join(SHAPES)
        raise UsageError(
            f"shape {text!r} is neither one of {known} nor E,K,H,I such as 128,8,2048,768"
        ) from error
    if min(experts, top_k, hidden, intermediate) < 1 or top_k > experts:
        raise UsageError(f"shape {text!r} needs positive sizes and a top-k of at most its {experts} experts")
    return Shape(
        ",".join(map(str, (experts, top_k, hidden, intermediate))), experts, top_k, hidden, intermediate
    )


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A case to be made up. ``dtype``: of the experts' weights (``nvfp4``, ``bf16``, ``fp8``, ``fp16``)."""

    shape: Shape
    tokens: int
    dtype: str
    routing: Routing = "uniform"
    seed: int = 0

    @property
    def name(self) -> str:
        tokens = f"{self.tokens} token{'s' if self.tokens != 1 else ''}"
        return f"{self.shape.name} {self.dtype}, {tokens}, top-{self.shape.top_k}, {self.routing}"
