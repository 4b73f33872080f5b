"""The stable twin of examples/racy_moe.py.

    detaudit run examples/stable_moe.py

The same experts, whose contributions are gathered and summed in a fixed order.
"""

from __future__ import annotations

import torch
from racy_moe import TOP_K, Experts, MoE, make_inputs
from racy_moe import build_model as build_racy_model
from torch import Tensor, nn

__all__ = ["build_model", "make_inputs"]


class OrderedExperts(Experts):
    """Gathers each token's k contributions in ascending order of expert and adds them in that order."""

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        token, contribution = self.contributions(x, experts, weights)
        by_token = torch.argsort(token, stable=True)
        slots = contribution[by_token].view(x.shape[0], TOP_K, -1).unbind(1)
        total = slots[0]
        for slot in slots[1:]:
            total = total + slot
        return total


class StableMoE(MoE):
    experts_class = OrderedExperts


def build_model() -> nn.Module:
    return build_racy_model(StableMoE)
