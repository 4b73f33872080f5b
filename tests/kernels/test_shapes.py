from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detaudit.core.errors import UsageError
from detaudit.kernels.routing import ROUTINGS, Routing, synthetic_routing
from detaudit.kernels.shapes import SHAPES, Shape, Synthetic, parse_shape


def test_named_shapes() -> None:
    assert {name: (s.experts, s.top_k, s.hidden, s.intermediate) for name, s in SHAPES.items()} == {
        "qwen3-30b-a3b": (128, 8, 2048, 768),
        "qwen3-next-80b": (512, 10, 2048, 512),
        "deepseek-v3": (256, 8, 7168, 2048),
        "gpt-oss-120b": (128, 4, 2880, 2880),
    }
    assert parse_shape("Qwen3-30B-A3B") is SHAPES["qwen3-30b-a3b"]


def test_a_shape_of_numbers() -> None:
    assert parse_shape("16, 4,512,256") == Shape("16,4,512,256", 16, 4, 512, 256)


@pytest.mark.parametrize(
    "text", ["", "qwen", "1,2,3", "1,2,3,4,5", "4,5,512,256", "8,0,512,256", "8,2,512,x"]
)
def test_a_shape_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageError, match="shape"):
        parse_shape(text)


def test_a_synthetic_case_is_named_after_what_it_is() -> None:
    wanted = Synthetic(SHAPES["deepseek-v3"], 1, "bf16", "hot")
    assert wanted.name == "deepseek-v3 bf16, 1 token, top-8, hot"


@given(
    routing=st.sampled_from(get_args(Routing)),
    tokens=st.integers(0, 40),
    experts=st.integers(1, 32),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_routing_is_what_a_router_could_give(
    routing: Routing, tokens: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    chosen, scales = synthetic_routing(routing, tokens, experts, top_k, seed=3)
    assert (chosen.dtype, scales.dtype) == (torch.int32, torch.float32)
    assert chosen.shape == scales.shape == (tokens, top_k)
    assert bool(((chosen >= 0) & (chosen < experts)).all())
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.allclose(scales.sum(1), torch.ones(tokens))
    assert bool((scales.diff(dim=1) <= 0).all())
    again = synthetic_routing(routing, tokens, experts, top_k, seed=3)
    assert torch.equal(chosen, again[0])
    assert torch.equal(scales, again[1])


def load(routing: Routing) -> list[int]:
    """Tokens per expert, most loaded first."""
    chosen, _ = synthetic_routing(routing, 4000, 64, 4)
    counts = torch.bincount(chosen.flatten().long(), minlength=64)
    return sorted(counts.tolist(), reverse=True)


def test_the_three_patterns_load_experts_as_named() -> None:
    mean = 4000 * 4 / 64
    uniform, skewed, hot = load("uniform"), load("skewed"), load("hot")
    assert uniform[0] < 1.3 * mean
    assert uniform[-1] > 0.7 * mean
    assert skewed[0] > 5 * mean
    assert skewed[-1] < 0.5 * mean
    assert hot[0] == 4000
    assert hot[1] < 1.3 * mean


def test_other_seeds_route_otherwise_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    first = synthetic_routing("uniform", 64, 16, 4, seed=0)[0]
    assert not torch.equal(first, synthetic_routing("uniform", 64, 16, 4, seed=1)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_more_experts_per_token_than_there_are() -> None:
    with pytest.raises(UsageError, match="top-k is 5"):
        synthetic_routing("uniform", 4, 4, 5)


def test_the_command_line_lists_the_same_routings() -> None:
    from detaudit.commands import kernels

    assert kernels.ROUTINGS == ROUTINGS
