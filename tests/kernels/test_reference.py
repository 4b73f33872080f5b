"""The reference MoE: arithmetic against a plain loop, its race with a control, its error against theory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from detaudit.core.errors import UsageError
from detaudit.kernels import nvfp4, reference
from detaudit.kernels.finalize import Accumulate, finalize_atomic, finalize_ordered
from detaudit.kernels.reference import NVFP4Experts, NVFP4MoE, dense_moe, moe_fp64, reference_moe
from detaudit.kernels.router import Router, route
from detaudit.kernels.swizzle import unswizzle
from tests.kernels import theory

NAMES = (
    "fc1_weight",
    "fc1_scale",
    "fc1_global",
    "fc2_weight",
    "fc2_scale",
    "fc2_global",
    "a1_global",
    "a2_global",
)
RUNS = 25


@dataclass(frozen=True)
class Layer:
    """A routed batch, dense weights and the experts quantized from them."""

    x: Tensor
    selected: Tensor
    scales: Tensor
    fc1: Tensor
    fc2: Tensor
    experts: NVFP4Experts

    @property
    def routed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.selected, self.scales

    @property
    def operands(self) -> list[Tensor]:
        return [getattr(self.experts, name).data for name in NAMES]


def make_layer(
    tokens: int = 32,
    hidden: int = 64,
    inner: int = 32,
    num_experts: int = 8,
    top_k: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    g = torch.Generator().manual_seed(11)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    fc1 = torch.randn(num_experts, 2 * inner, hidden, generator=g) / math.sqrt(hidden)
    fc2 = torch.randn(num_experts, hidden, inner, generator=g) / math.sqrt(inner)
    selected, scales = route(torch.randn(tokens, num_experts, generator=g), top_k)
    a1, a2 = reference.calibrate(x.float(), selected, fc1)
    return Layer(x, selected, scales, fc1, fc2, NVFP4Experts(fc1, fc2, a1, a2))


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact.double()).norm() / exact.double().norm())


def differing(outputs: list[Tensor]) -> int:
    return sum(not torch.equal(y, outputs[0]) for y in outputs[1:])


# Router


def test_route_is_softmax_top_k_renormalized() -> None:
    logits = [[1.0, 3.0, 2.0, -1.0], [0.0, -2.0, 0.5, 4.0]]
    experts, scales = route(torch.tensor(logits), 2)
    assert experts.dtype == torch.int32
    assert experts.tolist() == [[1, 2], [3, 2]]
    for row, chosen, got in zip(logits, experts.tolist(), scales.tolist(), strict=True):
        weights = [math.exp(row[e]) for e in chosen]
        assert got == pytest.approx([w / sum(weights) for w in weights], rel=1e-6)


def test_route_without_renormalizing_keeps_the_probabilities() -> None:
    _, scales = route(torch.tensor([[0.0, 0.0, 0.0, 0.0]]), 2, renormalize=False)
    assert scales.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize("top_k", [0, 5])
def test_route_refuses_more_experts_than_there_are(top_k: int) -> None:
    with pytest.raises(UsageError, match="choose 1 to that many"):
        route(torch.zeros(1, 4), top_k)


# Finalize

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]


def random_rows(tokens: int, top_k: int, hidden: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """(rows grouped in a random order, order, scales)."""
    g = torch.Generator().manual_seed(12)
    order = torch.randperm(tokens * top_k, generator=g).to(device)
    rows = torch.randn(tokens * top_k, hidden, generator=g).to(device)
    return rows, order, torch.rand(tokens, top_k, generator=g).to(device)


def poisoned(rows: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((scales.shape[0], rows.shape[1]), math.nan, dtype=dtype, device=rows.device)


def atomic_runs(
    rows: Tensor, order: Tensor, scales: Tensor, accumulate: Accumulate, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [
        finalize_atomic(rows, order, scales, poisoned(rows, scales, dtype), accumulate) for _ in range(RUNS)
    ]


def test_ordered_adds_in_the_order_of_k_and_rounds_once() -> None:
    rows, order, scales = random_rows(7, 5, 3)
    out = finalize_ordered(rows, order, scales, poisoned(rows, scales, torch.bfloat16))
    place = {int(slot): r for r, slot in enumerate(order)}
    for t in range(7):
        total = torch.zeros(3)
        for k in range(5):
            total = total + rows[place[t * 5 + k]] * scales[t, k]
        assert torch.equal(out[t], total.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("accumulate", "tolerance"), [("fp32", 2.0**-8), ("bf16", 2.0**-6)])
def test_atomic_gives_the_same_sum(
    device: str, dtype: torch.dtype, accumulate: Accumulate, tolerance: float
) -> None:
    rows, order, scales = random_rows(9, 6, 16, device)
    out = finalize_atomic(rows, order, scales, poisoned(rows, scales, dtype), accumulate)
    exact = finalize_ordered(rows.double(), order, scales, poisoned(rows, scales, torch.float64))
    assert out.dtype == dtype
    assert relative(out, exact) < (1e-6 if (dtype, accumulate) == (torch.float32, "fp32") else tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_accumulation_rounds_each_addition(device: str) -> None:
    """Seven equal terms, so that the order cannot matter: 7 * 129/128 is 903/128, step by step 900/128."""
    term = 129 / 128
    rows = torch.full((7, 16), term, device=device)
    order, scales = torch.arange(7, device=device), torch.ones(1, 7, device=device)
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(7):
        total += term
    assert total == 900 / 128
    assert (finalize_atomic(rows, order, scales, poisoned(rows, scales), "bf16") == 900 / 128).all()
    assert (finalize_atomic(rows, order, scales, poisoned(rows, scales), "fp32") == 903 / 128).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_up_to_two_terms_cannot_differ_while_more_do(
    four_threads: None, device: str, top_k: int, accumulate: Accumulate
) -> None:
    if not differing(atomic_runs(*random_rows(1024, 8, 512, device), accumulate)):
        pytest.skip("the sum of 8 terms did not vary on this machine, so nothing would be shown")
    rows, order, scales = random_rows(1024, top_k, 512, device)
    outputs = atomic_runs(rows, order, scales, accumulate)
    assert differing(outputs) == 0
    if accumulate == "fp32":
        assert torch.equal(outputs[0], finalize_ordered(rows, order, scales, poisoned(rows, scales)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_ordered_is_stable_where_atomic_varies(
    four_threads: None, device: str, dtype: torch.dtype, accumulate: Accumulate
) -> None:
    rows, order, scales = random_rows(1024, 8, 512, device)
    if not differing(atomic_runs(rows, order, scales, accumulate, dtype)):
        pytest.skip("the atomic finalize did not vary on this machine, so nothing would be shown")
    outputs = [finalize_ordered(rows, order, scales, poisoned(rows, scales, dtype)) for _ in range(RUNS)]
    assert differing(outputs) == 0


@pytest.mark.parametrize("tokens", [16, 1024])
def test_the_bf16_race_needs_neither_torch_threads_nor_size(tokens: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        varied = differing(atomic_runs(*random_rows(tokens, 8, 512), "bf16"))
    finally:
        torch.set_num_threads(before)
    if not varied and (os.cpu_count() or 1) == 1:
        pytest.skip("one core ran the threads one after the other")
    assert varied


# The layer


def plain_loop(layer: Layer) -> Tensor:
    """One token and one expert at a time, in float64, dividing by each global scale where it was applied."""
    inner, hidden = layer.fc2.shape[2], layer.fc2.shape[1]
    w1, s1, g1, w2, s2, g2, a1, a2 = layer.operands

    def weight(packed: Tensor, scale: Tensor, glob: Tensor, rows: int, columns: int) -> Tensor:
        linear = unswizzle(scale, rows, columns // 16)
        return nvfp4.dequantize(packed, linear).double() / glob.double()

    def activation(v: Tensor, glob: Tensor) -> Tensor:
        return nvfp4.dequantize(*nvfp4.quantize(v, glob)).double() / glob.double()

    out = torch.zeros(layer.x.shape, dtype=torch.float64)
    for t, token in enumerate(layer.x):
        for e, scale in zip(layer.selected[t].tolist(), layer.scales[t].double(), strict=True):
            both = weight(w1[e], s1[e], g1[e], 2 * inner, hidden) @ activation(token, a1)
            up, gate = both[:inner], both[inner:]
            down = weight(w2[e], s2[e], g2[e], hidden, inner)
            out[t] += scale * (down @ activation(up * silu(gate), a2))
    return out


def test_layer_equals_a_plain_loop() -> None:
    layer = make_layer()
    expected = plain_loop(layer)
    assert relative(moe_fp64(*layer.routed, *layer.operands), expected) < 1e-6
    assert relative(reference_moe(*layer.routed, *layer.operands, finalize="ordered"), expected) < 1e-6
    assert relative(reference_moe(*layer.routed, *layer.operands, finalize="atomic"), expected) < 1e-6


@pytest.mark.parametrize("elements", [1, 3 * 64 * 64])
def test_experts_one_by_one_or_in_groups_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    layer = make_layer()
    together = reference_moe(*layer.routed, *layer.operands, finalize="ordered")
    monkeypatch.setattr(reference, "_GROUP_ELEMENTS", elements)
    assert torch.equal(reference_moe(*layer.routed, *layer.operands, finalize="ordered"), together)


def test_bf16_layer_keeps_its_dtype_and_is_close_to_fp64() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    exact = moe_fp64(*layer.routed, *layer.operands)
    for finalize in ("ordered", "atomic"):
        out = reference_moe(*layer.routed, *layer.operands, finalize=finalize, accumulate="bf16")
        assert out.dtype == torch.bfloat16
        # Rounding to bfloat16 before the second quantization moves a few values across an E2M1 boundary.
        assert 2.0**-10 < relative(out, exact) < 0.05


def test_up_rows_come_before_gate_rows() -> None:
    layer = make_layer()
    inner = layer.fc2.shape[2]
    out = dense_moe(*layer.routed, layer.fc1, layer.fc2)
    swapped = dense_moe(*layer.routed, layer.fc1.roll(inner, dims=1), layer.fc2)
    token, e = layer.x[0], layer.selected[0]
    first = layer.fc1[e.long()] @ token
    act = silu(first[:, inner:]) * first[:, :inner]
    expected = (layer.scales[0, :, None] * (layer.fc2[e.long()] @ act.unsqueeze(-1)).squeeze(-1)).sum(0)
    assert relative(out[0], expected) < 1e-5
    assert relative(swapped[0], expected) > 0.1


def test_out_is_overwritten_and_returned() -> None:
    layer = make_layer()
    expected = reference_moe(*layer.routed, *layer.operands, finalize="ordered")
    for finalize in ("ordered", "atomic"):
        out = torch.full_like(layer.x, math.nan)
        assert reference_moe(*layer.routed, *layer.operands, finalize=finalize, out=out) is out
        assert relative(out, expected) < 1e-6


def test_experts_without_tokens_and_no_tokens_at_all() -> None:
    layer = make_layer(tokens=3, num_experts=8, top_k=1)
    assert reference_moe(*layer.routed, *layer.operands).isfinite().all()
    x, selected, scales = (t[:0] for t in layer.routed)
    assert reference_moe(x, selected, scales, *layer.operands).shape == (0, 64)


def test_arguments_that_cannot_be_meant() -> None:
    layer = make_layer()
    x, selected, scales = layer.routed
    with pytest.raises(UsageError, match="outside 0"):
        reference_moe(x, selected + 1, scales, *layer.operands)
    with pytest.raises(UsageError, match="choose one of atomic, ordered"):
        reference_moe(x, selected, scales, *layer.operands, finalize="fused")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="choose one of fp32, bf16"):
        NVFP4Experts(layer.fc1, layer.fc2, *layer.operands[-2:], accumulate="fp16")  # type: ignore[arg-type]


def test_layer_is_stable_when_ordered_and_varies_when_atomic(four_threads: None) -> None:
    layer = make_layer(tokens=256, hidden=512, inner=64, num_experts=16, top_k=8)
    layer.experts.finalize = "atomic"
    varied = differing([layer.experts(*layer.routed) for _ in range(RUNS)])
    if not varied:
        pytest.skip("the atomic finalize did not vary on this machine, so nothing would be shown")
    layer.experts.finalize = "ordered"
    assert differing([layer.experts(*layer.routed) for _ in range(RUNS)]) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_layer_agrees_with_fp64_on_the_host(dtype: torch.dtype) -> None:
    layer = make_layer(tokens=64, hidden=256, inner=64, num_experts=16, top_k=8, dtype=dtype)
    exact = moe_fp64(*layer.routed, *layer.operands)
    on_device = [t.cuda() for t in (*layer.routed, *layer.operands)]
    assert relative(moe_fp64(*on_device).cpu(), exact) < 1e-3
    for finalize in ("ordered", "atomic"):
        out = reference_moe(*on_device, finalize=finalize)
        assert out.is_cuda
        assert out.dtype == dtype
        assert relative(out.cpu(), exact) < (0.01 if dtype == torch.float32 else 0.05)


# The modules


def test_experts_call_the_module_level_function(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def tapped(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return reference_moe(*args, **kwargs)

    monkeypatch.setattr(reference, "reference_moe", tapped)
    layer.experts(*layer.routed)
    ((args, kwargs),) = seen
    assert len(args) == 11
    assert all(isinstance(arg, Tensor) for arg in args)
    assert kwargs == {"finalize": "atomic", "accumulate": "fp32"}


def test_moe_keeps_leading_dimensions_and_names_its_children() -> None:
    layer = make_layer()
    moe = NVFP4MoE(Router(torch.randn(8, 64, generator=torch.Generator().manual_seed(13)), 4), layer.experts)
    assert [name for name, _ in moe.named_children()] == ["gate", "experts"]
    x = layer.x.view(4, 8, 64)
    assert relative(moe(x), moe(layer.x).view_as(x)) < 1e-6


def test_a_call_changes_nothing_it_was_given() -> None:
    layer = make_layer()
    assert not list(layer.experts.buffers())
    before = {name: value.clone() for name, value in layer.experts.state_dict().items()}
    attributes = set(vars(layer.experts))
    inputs = [t.clone() for t in layer.routed]
    layer.experts(*layer.routed)
    assert set(vars(layer.experts)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in layer.experts.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(inputs, layer.routed, strict=True))


# Accuracy (docs/nvfp4.md)


def test_codec_error_on_gaussian_data_is_the_derived_one() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(14))
    scale = nvfp4.global_scale(x)
    measured = relative(nvfp4.dequantize(*nvfp4.quantize(x, scale), scale), x)
    assert theory.gaussian_noise(x.abs().max().item()) == pytest.approx(0.0951, rel=0.002)
    assert measured == pytest.approx(0.0951, rel=0.01)


def test_layer_error_against_fp32_is_the_derived_one() -> None:
    layer = make_layer(tokens=256, hidden=512, inner=256, num_experts=16, top_k=8)
    quantized = reference_moe(*layer.routed, *layer.operands, finalize="ordered")
    measured = relative(quantized, dense_moe(*layer.routed, layer.fc1, layer.fc2))
    assert measured == pytest.approx(theory.moe_error(0.0951), rel=0.05)
