"""A small mixture-of-experts transformer with NVFP4 experts whose finalize races.

    detaudit run examples/nvfp4_moe.py
    DETAUDIT_EXAMPLE_FINALIZE=ordered detaudit run examples/nvfp4_moe.py

The experts sum each token's top-8 contributions in whatever order the threads arrive, as the fused finalize
of a CUTLASS MoE does with atomics. Two runs on the same tokens give different logits, and the origin is
``layers.0.mlp.experts``. With the ordered finalize they are equal. Weights are random and the seeds fixed.

Run as a script it only shows the symptom:

    python examples/nvfp4_moe.py --finalize ordered --runs 10
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from detaudit.kernels.finalize import Finalize
from detaudit.kernels.reference import NVFP4Experts, calibrate, dense_moe, swiglu
from detaudit.kernels.router import Router

LAYERS, HEADS, HIDDEN, INTERMEDIATE, VOCABULARY = 3, 8, 512, 64, 1024
EXPERTS, TOP_K = 16, 8
BATCH, LENGTH = 2, 128
THREADS = 4
"""Several threads have to take part in the sum, or there is no race to see. Fixed, whatever the machine."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.qkv = linear(HIDDEN, 3 * HIDDEN, generator)
        self.proj = linear(HIDDEN, HIDDEN, generator)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return out


class DenseExperts(nn.Module):
    """The experts before they are quantized."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator))
        self.fc2 = nn.Parameter(normal(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator))

    def forward(self, x: Tensor, selected: Tensor, scales: Tensor) -> Tensor:
        return dense_moe(x, selected, scales, self.fc1, self.fc2)


class SharedExpert(nn.Module):
    """A SwiGLU expert that every token passes through."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up_gate = linear(HIDDEN, 2 * INTERMEDIATE, generator)
        self.down = linear(INTERMEDIATE, HIDDEN, generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.up_gate(x)))
        return out


class MoE(nn.Module):
    """Router, routed experts, shared expert."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = Router(normal(EXPERTS, HIDDEN, generator=generator), TOP_K)
        self.experts: nn.Module = DenseExperts(generator)
        self.shared_expert = SharedExpert(generator)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        out: Tensor = self.experts(tokens, *self.gate(tokens)) + self.shared_expert(tokens)
        return out.view(x.shape)


class Layer(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(HIDDEN)
        self.self_attn = Attention(generator)
        self.post_norm = nn.RMSNorm(HIDDEN)
        self.mlp = MoE(generator)

    def attend(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.self_attn(self.input_norm(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out


class Transformer(nn.Module):
    """Token ids [B, S] to logits [B, S, V]."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.embed = nn.Embedding(
            VOCABULARY, HIDDEN, _weight=torch.randn(VOCABULARY, HIDDEN, generator=generator)
        )
        self.layers = nn.ModuleList(Layer(generator) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = linear(HIDDEN, VOCABULARY, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Gaussian weights of variance 1 / fan-in, so that activations keep their size."""
    return torch.randn(shape, generator=generator).div_(math.sqrt(shape[-1]))


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(normal(outputs, inputs, generator=generator))
    return layer


def token_ids(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def build_dense() -> Transformer:
    """The float32 model that `build_model` quantizes."""
    return Transformer(torch.Generator().manual_seed(0)).eval().requires_grad_(False)


@torch.no_grad()
def quantize(model: Transformer, tokens: Tensor, finalize: Finalize) -> Transformer:
    """Replace the experts by NVFP4 ones, layer by layer, calibrated on what ``tokens`` lead to.

    Calibration runs through the dense experts, which do not race, so every process gets the same weights.
    """
    x = model.embed(tokens)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        dense = layer.mlp.experts
        assert isinstance(dense, DenseExperts)
        hidden = layer.post_norm(layer.attend(x)).flatten(0, 1)
        selected, _ = layer.mlp.gate(hidden)
        scales = calibrate(hidden, selected, dense.fc1)
        x = layer(x)
        layer.mlp.experts = NVFP4Experts(dense.fc1, dense.fc2, *scales, finalize=finalize)
    return model


def build_model(finalize: str | None = None) -> Transformer:
    """The NVFP4 model; DETAUDIT_EXAMPLE_FINALIZE (``atomic`` or ``ordered``) picks the finalize."""
    chosen = finalize or os.environ.get("DETAUDIT_EXAMPLE_FINALIZE", "atomic")
    if chosen not in ("atomic", "ordered"):
        raise ValueError(f"DETAUDIT_EXAMPLE_FINALIZE is {chosen!r}; set it to atomic or ordered")
    torch.set_num_threads(THREADS)
    return quantize(build_dense(), token_ids(seed=1), "ordered" if chosen == "ordered" else "atomic").eval()


def make_inputs() -> Tensor:
    return token_ids(seed=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--finalize", choices=["atomic", "ordered"])
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    model = build_model(options.finalize)
    prints = [
        hashlib.sha256(model(make_inputs()).numpy().tobytes()).hexdigest()[:16] for _ in range(options.runs)
    ]
    print(*prints, sep="\n")
    print(f"{len(set(prints))} different outputs in {options.runs} runs on the same tokens")


if __name__ == "__main__":
    main()
