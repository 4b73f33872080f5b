"""The codec against exact arithmetic, over all codes, and against FlashInfer's own host helpers."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from detaudit.core.errors import UsageError
from detaudit.kernels import nvfp4
from tests.kernels import exact

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def edges(magnitudes: Sequence[Fraction]) -> list[float]:
    """Every value, every midpoint, the float32 neighbours of both, and what lies outside, with both signs."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(magnitudes)]
    beyond = magnitudes[-1] + (magnitudes[-1] - magnitudes[-2]) / 2
    points = [float(x) for x in [*magnitudes, *middles, beyond]]
    points += [n for x in points if x for n in exact.f32_neighbours(x)]
    points += [2.0**-149, 2.0**-126, 2.0**-127, 1e4, 3.4028234663852886e38, math.inf]
    return points + [-x for x in points]


@pytest.mark.parametrize("device", DEVICES)
def test_every_e2m1_code_decodes_to_its_definition(device: str) -> None:
    decoded = nvfp4.decode_e2m1(ALL_CODES[:16].to(device))
    assert decoded.device.type == device
    assert [Fraction(x) for x in decoded.tolist()] == [exact.e2m1_value(code) for code in range(16)]
    assert torch.signbit(decoded).tolist() == [code >= 8 for code in range(16)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_e4m3_code_decodes_to_its_definition(device: str) -> None:
    decoded = nvfp4.decode_e4m3(ALL_CODES.to(device)).tolist()
    values = [None if math.isnan(x) else Fraction(x) for x in decoded]
    assert values == [exact.e4m3_value(code) for code in range(256)]
    assert [code for code, value in enumerate(values) if value is None] == [0x7F, 0xFF]


@pytest.mark.parametrize("device", DEVICES)
def test_codes_survive_a_round_trip(device: str) -> None:
    e2m1, e4m3 = ALL_CODES[:16].to(device), ALL_CODES.to(device)
    assert torch.equal(nvfp4.encode_e2m1(nvfp4.decode_e2m1(e2m1)), e2m1)
    back = nvfp4.encode_e4m3(nvfp4.decode_e4m3(e4m3))
    assert torch.equal(back, e4m3)


@pytest.mark.parametrize("device", DEVICES)
def test_e2m1_rounds_to_nearest_even_at_every_boundary(device: str) -> None:
    points = edges(exact.E2M1)
    codes = nvfp4.encode_e2m1(torch.tensor(points, device=device)).tolist()
    assert codes == [exact.nearest_even(x, exact.E2M1, 8) for x in points]


@pytest.mark.parametrize("device", DEVICES)
def test_e4m3_rounds_to_nearest_even_at_every_boundary(device: str) -> None:
    points = edges(exact.E4M3)
    codes = nvfp4.encode_e4m3(torch.tensor(points, device=device)).tolist()
    assert codes == [exact.nearest_even(x, exact.E4M3, 0x80) for x in points]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
@settings(deadline=None, max_examples=150)
def test_any_float_rounds_to_the_nearest_code(values: list[float]) -> None:
    codes = nvfp4.encode_e2m1(torch.tensor(values)).tolist()
    assert codes == [exact.nearest_even(x, exact.E2M1, 8) for x in values]


def test_nan_becomes_six_as_e2m1_and_stays_nan_as_e4m3() -> None:
    nans = torch.tensor([math.nan, -math.nan])
    assert nvfp4.encode_e2m1(nans).tolist() == [7, 7]
    assert nvfp4.decode_e4m3(nvfp4.encode_e4m3(nans)).isnan().all()


def test_all_pairs_of_codes_pack_low_nibble_first() -> None:
    codes = torch.stack((ALL_CODES & 15, ALL_CODES >> 4), dim=-1)
    packed = nvfp4.pack(codes)
    assert torch.equal(packed.flatten(), ALL_CODES)
    assert torch.equal(nvfp4.unpack(packed), codes)
    assert nvfp4.pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_times_every_scale_dequantizes_exactly(device: str) -> None:
    packed = nvfp4.pack(ALL_CODES[:16]).expand(256, 8).to(device)
    table = nvfp4.dequantize(packed, ALL_CODES.unsqueeze(1).to(device)).cpu()
    for scale_code, row in enumerate(table.tolist()):
        scale = exact.e4m3_value(scale_code)
        if scale is None:
            assert all(math.isnan(x) for x in row)
        else:
            assert [Fraction(x) for x in row] == [exact.e2m1_value(code) * scale for code in range(16)]


def assert_quantizes_exactly(x: Tensor, scale: float) -> None:
    packed, scales = nvfp4.quantize(x, torch.tensor(scale, device=x.device))
    codes = nvfp4.unpack(packed).view(-1, 16).tolist()
    for block, got, got_scale in zip(
        x.float().view(-1, 16).tolist(), codes, scales.flatten().tolist(), strict=True
    ):
        assert (got, got_scale) == exact.quantize_block(block, scale), block


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_equals_exact_arithmetic(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x *= torch.logspace(-6, 2, 24, device=device).unsqueeze(1).to(dtype)
    assert_quantizes_exactly(x, nvfp4.global_scale(x).item())
    assert_quantizes_exactly(x, 1.0)


@given(
    st.lists(st.floats(width=32), min_size=16, max_size=16),
    st.floats(min_value=2.0**-116, max_value=2.0**126, width=32),
)
@settings(deadline=None, max_examples=150)
def test_any_block_and_scale_quantize_as_exact_arithmetic_does(block: list[float], scale: float) -> None:
    assert_quantizes_exactly(torch.tensor(block), scale)


def test_infinity_saturates_and_nan_takes_no_part_in_the_scale() -> None:
    block = torch.ones(3, 16)
    block[1, 3], block[2, 5] = -math.inf, math.nan
    one = torch.tensor(1.0)
    packed, scales = nvfp4.quantize(block, one)
    values = nvfp4.dequantize(packed, scales, one)
    assert values[1, 3] == -6 * 448
    assert scales[2] == scales[0]
    assert nvfp4.unpack(packed)[2, 5] == 7
    assert values.isfinite().all()


def test_a_block_whose_scale_rounds_to_zero_is_zero() -> None:
    x = torch.tensor([[1e-5, -1e-5] * 8])
    packed, scales = nvfp4.quantize(x, torch.tensor(1.0))
    assert scales.item() == 0
    assert not nvfp4.dequantize(packed, scales).any()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, -2.0], 1344.0), ([0.0], 1.0), ([], 1.0), ([math.nan, math.inf, 6.0], 448.0), ([1e-45], 2.0**126)],
)
def test_global_scale(values: list[float], expected: float) -> None:
    scale = nvfp4.global_scale(torch.tensor(values))
    assert scale.shape == ()
    assert scale.dtype == torch.float32
    assert scale.item() == expected


def test_one_global_scale_per_expert_broadcasts() -> None:
    weights = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [1, 10, 0.1]
    ).view(3, 1, 1)
    per_expert = torch.stack([nvfp4.global_scale(w) for w in weights])
    packed, scales = nvfp4.quantize(weights, per_expert.view(3, 1, 1))
    values = nvfp4.dequantize(packed, scales, per_expert.view(3, 1, 1))
    for e, weight in enumerate(weights):
        alone = nvfp4.quantize(weight, per_expert[e])
        assert torch.equal(packed[e], alone[0])
        assert torch.equal(scales[e], alone[1])
        assert torch.equal(values[e], nvfp4.dequantize(*alone, per_expert[e]))


def test_input_and_global_state_are_left_alone() -> None:
    x = torch.randn(2, 32, dtype=torch.float32)
    before, generator = x.clone(), torch.get_rng_state()
    nvfp4.quantize(x, nvfp4.global_scale(x))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_default_device_and_dtype_do_not_change_the_codes() -> None:
    x = torch.randn(4, 32, dtype=torch.float32)
    expected = nvfp4.quantize(x, nvfp4.global_scale(x))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = nvfp4.quantize(x, nvfp4.global_scale(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sizes_that_do_not_fit_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="pad it to a multiple of 16"):
        nvfp4.quantize(torch.ones(2, 24), torch.tensor(1.0))
    with pytest.raises(UsageError, match="packed in pairs"):
        nvfp4.pack(torch.zeros(3, dtype=torch.uint8))


def flashinfer_helper(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"flashinfer.{module}"), name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this FlashInfer has no {module}.{name} that loads here: {error}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_reads_our_codes() -> None:
    decode = flashinfer_helper("quantization.fp4_quantization", "_e2m1_and_ufp8sf_scale_to_float_cpu")
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    scale = torch.tensor(128.0)
    packed, scales = nvfp4.quantize(x, scale)
    theirs = decode(packed, scales, 1 / scale, 16, 1, False)
    assert torch.equal(nvfp4.dequantize(packed, scales, scale), theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_quantizes_to_our_codes_away_from_ties() -> None:
    """FlashInfer's Python helper sends ties down and divides in another order; elsewhere it must agree."""
    encode = flashinfer_helper("trace.templates.quantize", "_fp4_quantize_reference")
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    scale = nvfp4.global_scale(x)
    packed, scales = nvfp4.quantize(x, scale)
    their_packed, their_scales = encode(x, scale)
    assert torch.equal(their_scales.view(torch.uint8), scales)
    ours, theirs = nvfp4.unpack(packed), nvfp4.unpack(their_packed)
    exponent_free = (x.view(64, 16, 16) * scale / nvfp4.decode_e4m3(scales).unsqueeze(-1)).view_as(x).abs()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    clear = ((exponent_free.unsqueeze(-1) - middles).abs() > 1e-5).all(-1)
    nonzero = (ours & 7) > 0
    assert clear.float().mean() > 0.99
    assert torch.equal(ours[clear & nonzero], theirs[clear & nonzero])
    assert not (theirs[clear & ~nonzero] & 7).any()
