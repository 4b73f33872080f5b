"""A stack shaped like Qwen3-30B-A3B whose experts call FlashInfer's CUTLASS MoE.

NVFP4 on Blackwell, bf16 on Hopper:

    detaudit run examples/flashinfer_moe.py
    DETAUDIT_EXAMPLE_FINALIZE=unfused detaudit run examples/flashinfer_moe.py
    DETAUDIT_EXAMPLE_TUNE=0 detaudit run examples/flashinfer_moe.py

Tuned, FlashInfer takes a GEMM2 whose epilogue adds the top-8 expert outputs with atomics: two runs on the
same tokens give different logits, and the origin is ``layers.0.mlp.experts``. Unfused they are equal. Untuned
they are equal too, but only because the fused kernel does not run. Two layers, random weights.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from detaudit.core.errors import Unsupported, UsageError
from detaudit.kernels.backend import Unavailable
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass
from detaudit.kernels.router import Router
from detaudit.kernels.shapes import SHAPES, Synthetic

SHAPE = SHAPES["qwen3-30b-a3b"]
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, TOKENS = 2, 32, 4, 128, 4096, 64


class Experts(nn.Module):
    """The routed experts: tokens [T, H], experts int32 [T, k], scales float32 [T, k] to [T, H]."""

    def __init__(self, weights: Case, fused: bool) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(weights.tensors["fc1_expert_weights"], requires_grad=False)
        self.fc2 = nn.Parameter(weights.tensors["fc2_expert_weights"], requires_grad=False)
        self.scales = nn.ParameterList(
            nn.Parameter(scale, requires_grad=False) for scale in weights.group("quant_scales")
        )
        self.fused = fused

    def forward(self, x: Tensor, experts: Tensor, scales: Tensor) -> Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe

        out: Tensor = cutlass_fused_moe(
            input=x,
            token_selected_experts=experts,
            token_final_scales=scales,
            fc1_expert_weights=self.fc1,
            fc2_expert_weights=self.fc2,
            output_dtype=x.dtype,
            quant_scales=list(self.scales),
            use_fused_finalize=self.fused,
        )[0]
        return out


class Projection(nn.Module):
    """A linear layer without bias, bf16, made on the GPU."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(outputs, inputs, generator), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    """Causal self-attention with grouped queries over one sequence [T, H]."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.q_proj = Projection(SHAPE.hidden, HEADS * HEAD_SIZE, generator)
        self.k_proj = Projection(SHAPE.hidden, KV_HEADS * HEAD_SIZE, generator)
        self.v_proj = Projection(SHAPE.hidden, KV_HEADS * HEAD_SIZE, generator)
        self.o_proj = Projection(HEADS * HEAD_SIZE, SHAPE.hidden, generator)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).view(1, len(x), -1, HEAD_SIZE).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(len(x), -1))
        return out


class MoE(nn.Module):
    def __init__(self, weights: Case, fused: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = Router(normal(SHAPE.experts, SHAPE.hidden, generator), SHAPE.top_k)
        self.experts = Experts(weights, fused)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, *self.gate(x))
        return out


class Layer(nn.Module):
    def __init__(self, weights: Case, fused: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.input_layernorm = norm(generator)
        self.self_attn = Attention(generator)
        self.post_attention_layernorm = norm(generator)
        self.mlp = MoE(weights, fused, generator)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Transformer(nn.Module):
    """Token ids [T] to logits [T, V]."""

    def __init__(self, dtype: str, fused: bool) -> None:
        super().__init__()
        weights = [layer_weights(dtype, seed) for seed in range(LAYERS)]
        generator = torch.Generator("cuda").manual_seed(0)
        embedding = torch.randn(VOCABULARY, SHAPE.hidden, generator=generator, device="cuda").bfloat16()
        self.embed_tokens = nn.Embedding(VOCABULARY, SHAPE.hidden, _weight=embedding, _freeze=True)
        self.layers = nn.ModuleList(Layer(case, fused, generator) for case in weights)
        self.norm = norm(generator)
        self.lm_head = Projection(SHAPE.hidden, VOCABULARY, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def layer_weights(dtype: str, seed: int) -> Case:
    """One layer's weights and scales as arguments of the kernel; Unsupported where that cannot run."""
    made = FlashInferCutlass().synthetic(Synthetic(SHAPE, tokens=1, dtype=dtype, seed=seed))
    if isinstance(made, Unavailable):
        raise Unsupported(
            f"examples/flashinfer_moe.py cannot run: {made.sentence}; examples/nvfp4_moe.py runs anywhere"
        )
    return made


def normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """bf16 weights of variance 1 / columns, so that activations keep their size."""
    weight = torch.randn(rows, columns, generator=generator, device=generator.device)
    return weight.mul_(columns**-0.5).bfloat16()


def norm(generator: torch.Generator) -> nn.RMSNorm:
    return nn.RMSNorm(SHAPE.hidden, device=generator.device, dtype=torch.bfloat16)


def setting(name: str, default: str, values: tuple[str, ...]) -> str:
    chosen = os.environ.get(name, default)
    if chosen not in values:
        raise UsageError(f"{name} is {chosen!r}; set it to {' or '.join(values)}")
    return chosen


def weights_here() -> str:
    """NVFP4 where the GPU has it, else bf16; where that is not there either, building the model says so."""
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    return "nvfp4" if blackwell else "bf16"


@torch.no_grad()
def build_model() -> nn.Module:
    """DETAUDIT_EXAMPLE_FINALIZE (``fused`` or ``unfused``), DETAUDIT_EXAMPLE_TUNE (``1`` or ``0``)."""
    fused = setting("DETAUDIT_EXAMPLE_FINALIZE", "fused", ("fused", "unfused")) == "fused"
    tuned = setting("DETAUDIT_EXAMPLE_TUNE", "1", ("1", "0")) == "1"
    model = Transformer(weights_here(), fused).eval().requires_grad_(False)
    if tuned:
        from flashinfer.autotuner import autotune

        # One batch size only: tuning for every one of them takes a while.
        with autotune(True, tuning_buckets=(TOKENS,)):
            model(make_inputs())
    return model


def make_inputs() -> Tensor:
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return tokens.to("cuda")
