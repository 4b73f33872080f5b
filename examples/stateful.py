"""A model that remembers: no race, and yet equal inputs give different outputs.

    detaudit run examples/stateful.py

``Smoother`` keeps a running mean in a plain attribute. Buffers are put back before each run; a plain
attribute is the model's own business, so run k sees what run k-1 left. Two fresh processes that run the same
sequence agree run by run: `history-dependent`, not a race.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Smoother(nn.Module):
    """Blends its input with the mean of all inputs it has seen: [B, H] -> [B, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x if self.mean is None else 0.9 * self.mean + 0.1 * (x + self.mean.mean())
        return 0.5 * (x + self.mean)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Smoother(), nn.Linear(32, 8)).eval()


def make_inputs() -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
