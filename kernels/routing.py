"""Synthetic routing: which experts serve which token, in three patterns that stress a finalize differently.

How many terms are added to a row is top-k in all of them; how the rows spread over the experts' GEMM tiles,
and so in what order the terms arrive, is not.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from detaudit.core.errors import UsageError

Routing = Literal["uniform", "skewed", "hot"]
ROUTINGS: tuple[str, ...] = get_args(Routing)

_CERTAIN = 1e9


def synthetic_routing(
    routing: Routing, tokens: int, experts: int, top_k: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, k], distinct within a token, and scales float32 [T, k] that sum to one, on the CPU.

    ``uniform``: every expert is as likely as any other. ``skewed``: the expert of rank r is drawn with a
    weight of 1/r (Zipf), ranks shuffled. ``hot``: one expert serves every token, the others are uniform.
    The order within a token is by falling scale, as a router's top-k gives it. Same arguments, same routing.

    Raises:
        UsageError: ``top_k`` is not between 1 and ``experts``.
    """
    if not 1 <= top_k <= experts:
        raise UsageError(f"top-k is {top_k}, but there are {experts} experts; choose 1 to that many")
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.empty(tokens, experts, device="cpu").exponential_(generator=generator)
    weights = _log_weights(routing, experts, generator)
    # Gumbel noise added to log weights: its top-k is a draw without replacement (Efraimidis, Spirakis 2006).
    chosen = (weights - noise.log()).topk(top_k, dim=1).indices
    scales = torch.rand(tokens, top_k, generator=generator, device="cpu").add_(0.05)
    scales = (scales / scales.sum(dim=1, keepdim=True)).sort(dim=1, descending=True).values
    order = torch.rand(tokens, top_k, generator=generator, device="cpu").argsort(dim=1)
    return chosen.gather(1, order).to(torch.int32), scales.contiguous()


def _log_weights(routing: Routing, experts: int, generator: torch.Generator) -> Tensor:
    shuffled = torch.randperm(experts, generator=generator, device="cpu")
    weights = torch.zeros(experts, device="cpu")
    if routing == "skewed":
        weights = -(shuffled + 1.0).log()
    elif routing == "hot":
        weights[shuffled[0]] = _CERTAIN
    return weights
