"""The router of a mixture of experts: softmax, top-k, renormalize."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from detaudit.core.errors import UsageError


def route(logits: Tensor, top_k: int, *, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts per token by softmax probability.

    Args:
        logits: [T, E], any floating dtype; the softmax is computed in float32.
        top_k: experts per token, at most E.
        renormalize: make each token's scales sum to one.

    Returns:
        (experts int32 [T, k] by falling probability, scales float32 [T, k]), as FlashInfer takes them.

    Raises:
        UsageError: ``top_k`` is not between 1 and E.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise UsageError(f"top_k is {top_k}, but there are {logits.shape[-1]} experts; choose 1 to that many")
    scales, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    if renormalize:
        scales = scales / scales.sum(-1, keepdim=True)
    return experts.int(), scales


class Router(nn.Module):
    """A linear layer without bias and `route`; returns (experts, scales).

    Args:
        weight: [E, H], floating.
        top_k: experts per token.
    """

    def __init__(self, weight: Tensor, top_k: int, *, renormalize: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(x.to(self.weight.dtype), self.weight)
        return route(logits, self.top_k, renormalize=self.renormalize)
