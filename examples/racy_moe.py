"""A mixture of experts whose experts combine by a scatter that races between CPU threads.

    detaudit run examples/racy_moe.py

``index_put_(accumulate=True)`` in fp32 adds each token's top-k contributions in whatever order the threads
arrive, so the last bits of the sum change from run to run. The origin is ``layers.0.mlp.experts``.
examples/stable_moe.py is the same model with the sum taken in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 1024, 512, 32, 16, 8, 2
THREADS = 4


class Gate(nn.Module):
    """Router: [T, H] -> expert ids [T, k] (int64) and their renormalized weights [T, k]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = torch.topk(torch.softmax(x @ self.weight.T, dim=-1), TOP_K)
        return experts, weights / weights.sum(-1, keepdim=True)


class Experts(nn.Module):
    """SwiGLU experts, combined by an unordered scatter-add: [T, H] -> [T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.up_gate = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        token, contribution = self.contributions(x, experts, weights)
        return torch.zeros_like(x).index_put_((token,), contribution, accumulate=True)

    def contributions(self, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted expert outputs [T * k, H], grouped by expert, and the token each belongs to."""
        tokens, outputs = [], []
        for expert in range(EXPERTS):
            token, slot = torch.nonzero(experts == expert, as_tuple=True)
            up, gate = (x[token] @ self.up_gate[expert].T).chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * up
            outputs.append(hidden @ self.down[expert].T * weights[token, slot].unsqueeze(-1))
            tokens.append(token)
        return torch.cat(tokens), torch.cat(outputs)


class MoE(nn.Module):
    experts_class: type[Experts] = Experts

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = self.experts_class()

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.gate(x)
        return self.experts(x, experts, weights)


class Layer(nn.Module):
    def __init__(self, mlp: MoE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, moe: type[MoE]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(moe()) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model(moe: type[MoE] = MoE) -> nn.Module:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    return Model(moe).eval()


def make_inputs() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
