"""Arguments of ``cutlass_fused_moe`` against FlashInfer's own wrapper and the shape rules of its binding.

NVFP4 runs on Blackwell only. What can be known without one: the wrapper of the installed release takes the
arguments, they satisfy the checks of ``flashinfer_cutlass_fused_moe_binding.cu`` (stated again in `Binding`),
and the numbers they hold, taken apart by a construction of their own, are the weights that went in.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from detaudit.core.errors import Unsupported, UsageError
from detaudit.kernels import flashinfer_call as call
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_fp64 import reference_fp64
from detaudit.kernels.flashinfer_synthetic import quantize_input, synthetic_case
from detaudit.kernels.shapes import Shape, Synthetic
from tests.kernels.flashinfer_sm90 import as_compiled

flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)

CPU = torch.device("cpu")
SHAPES = [Shape("even", 6, 3, 256, 128), Shape("padded", 4, 3, 96, 160), Shape("odd", 3, 2, 2880, 96)]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def aligned(size: int, step: int) -> int:
    return (size + step - 1) // step * step


class Binding:
    """A compiled runner that checks what the binding checks, and computes nothing."""

    def __init__(self, x_dtype: torch.dtype, weight_dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        self.dtypes = x_dtype, weight_dtype, output_dtype
        self.per_element = 16 if weight_dtype == torch.int64 else 1

    def run_moe(self, output: Tensor, x: Tensor, selected: Tensor, scales: Tensor, *rest: Any) -> None:
        fc1, fc1_bias, fc2, fc2_bias, quant, input_sf, *_ = rest
        assert (x.dtype, fc1.dtype, output.dtype) == self.dtypes
        assert (fc2.dtype, selected.dtype, scales.dtype) == (fc1.dtype, torch.int32, torch.float32)
        assert (x.dim(), selected.dim(), scales.dim(), fc1.dim(), fc2.dim()) == (2, 2, 2, 3, 3)
        assert all(t.is_contiguous() for t in (x, selected, scales, fc1, fc2, *quant))
        assert x.shape[0] == selected.shape[0] == scales.shape[0]
        assert selected.shape[1] == scales.shape[1]
        assert fc1.shape[0] == fc2.shape[0]
        assert fc1.shape[1] == fc2.shape[2] * self.per_element * 2
        experts, hidden, inter = fc2.shape[0], fc2.shape[1], fc2.shape[2] * self.per_element
        least = 16 // min(x.element_size(), fc1.element_size())
        assert hidden % least == inter % least == 0
        assert output.shape == (x.shape[0], hidden)
        assert fc1_bias is fc2_bias is None
        if fc1.dtype == torch.int64:
            self.nvfp4(quant, x, input_sf, experts, hidden, inter)
        elif x.dtype == torch.float8_e4m3fn:
            self.fp8(quant, experts)
        else:
            assert (quant, input_sf) == ([], None)

    def nvfp4(self, quant: list[Tensor], x: Tensor, input_sf: Tensor | None, e: int, h: int, i: int) -> None:
        a1, block1, global1, a2, block2, global2 = quant
        assert all(t.dtype == torch.float32 for t in (a1, global1, a2, global2))
        assert block1.dtype == block2.dtype == torch.int32
        assert all(t.dim() == 0 or t.shape == (e,) for t in (a1, a2))
        assert global1.shape == global2.shape == (e,)
        assert block1.shape == (e, aligned(i, 64) * 2, aligned(h, 64) // 16 // 4)
        assert block2.shape == (e, aligned(h, 128), aligned(i, 64) // 16 // 4)
        if x.dtype == torch.uint8:
            assert x.shape[1] == h // 2
            assert input_sf is not None
            assert input_sf.numel() == aligned(x.shape[0], 128) * aligned(h // 16, 4)
        else:
            assert input_sf is None

    def fp8(self, quant: list[Tensor], e: int) -> None:
        fc1_dequant, fc2_quant, fc2_dequant, fc1_input_dequant = quant
        assert all(t.dtype == torch.float32 for t in quant)
        assert fc1_dequant.shape == fc2_dequant.shape == (e,)
        assert fc2_quant.dim() == 0 or fc2_quant.shape == (e,)
        assert fc1_input_dequant.dim() == 0


def check(case: Case, capability: tuple[int, int] = (12, 0)) -> None:
    """Call the installed wrapper with the case; `Binding` raises where the compiled module would."""
    with as_compiled(lambda *types: Binding(*types[:3]), capability):
        call.MoeCall(call.Library(), case, fused=False)()


def made(dtype: str, shape: Shape = SHAPES[0], tokens: int = 5) -> Case:
    return synthetic_case(Synthetic(shape, tokens, dtype), CPU)


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tuner: it would look at the GPU."""
    autotuner = importlib.import_module("flashinfer.autotuner")
    monkeypatch.setattr(
        autotuner.AutoTuner, "choose_one", lambda _self, _op, runners, *_, **__: (runners[0], -1)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", ["nvfp4", "bf16", "fp16", "fp8"])
def test_synthetic_arguments_pass_the_binding(dtype: str, shape: Shape) -> None:
    check(made(dtype, shape))


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_quantized_input_passes_the_binding(shape: Shape, tokens: int) -> None:
    check(quantize_input(made("nvfp4", shape, tokens)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("quant_scales[0]", lambda t: t.reshape(1)),
        ("quant_scales[1]", lambda t: t.view(torch.uint8)),
        ("quant_scales[1]", lambda t: t[:, :-1].contiguous()),
        ("quant_scales[2]", lambda t: t[:1]),
        ("fc1_expert_weights", lambda t: t.view(torch.uint8)),
        ("fc2_expert_weights", lambda t: t[:, :, :-1].contiguous()),
        ("token_selected_experts", lambda t: t.long()),
    ],
)
def test_the_rules_notice_what_is_wrong(name: str, change: Callable[[Tensor], Tensor]) -> None:
    case = made("nvfp4")
    wrong = dataclasses.replace(case, tensors={**case.tensors, name: change(case.tensors[name])})
    with pytest.raises((AssertionError, IndexError)):
        check(wrong)


def test_the_rules_are_those_of_the_installed_sources() -> None:
    """The constants `Binding` repeats, where the release ships its sources."""
    sources = Path(flashinfer.__file__).parent / "data"
    headers = list(sources.rglob("moe_gemm_kernels.h"))
    layouts = list(sources.rglob("sm100_blockscaled_layout.hpp"))
    if not headers or not layouts:
        pytest.skip("this FlashInfer comes without its CUDA sources")
    assert "NVFP4BlockScaleVectorSize = 16;" in headers[0].read_text()
    layout = "".join(layouts[0].read_text().split())
    assert "usingBlk_MN=_128;" in layout
    assert "usingBlk_SF=_4;" in layout


def dequantized(case: Case, gemm: int, expert: int) -> Tensor:
    """float64 weight of one expert, byte by byte: nibbles, the tile formula, both scales."""
    name = f"fc{gemm}_expert_weights"
    packed = case.tensors[name][expert].contiguous().view(torch.uint8)
    first = 3 * (gemm - 1)
    a, block, alpha = (case.tensors[f"quant_scales[{first + i}]"] for i in range(3))
    scales = block[expert].contiguous().view(torch.uint8).flatten()
    rows, columns = packed.shape[0], packed.shape[1] * 2 // 16
    across = aligned(columns, 4) // 4
    out = torch.empty(rows, columns * 16, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            at = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            scale = float(scales[at].view(torch.float8_e4m3fn).float())
            for k in range(8):
                byte = int(packed[r, c * 8 + k])
                for nibble, code in enumerate((byte & 15, byte >> 4)):
                    value = E2M1[code & 7] * (-1 if code & 8 else 1)
                    out[r, c * 16 + 2 * k + nibble] = value * scale
    return out * float(a * alpha[expert])


@pytest.mark.parametrize("gemm", [1, 2])
def test_nvfp4_weights_taken_apart_are_the_weights(gemm: int) -> None:
    shape = Shape("tiny", 2, 1, 64, 32)
    case = made("nvfp4", shape)
    dense = made("bf16", shape).tensors[f"fc{gemm}_expert_weights"].double()
    for expert in range(2):
        got = dequantized(case, gemm, expert)
        assert got.shape == dense[expert].shape
        # The error of one NVFP4 operand with Gaussian values is 0.0951 (docs/nvfp4.md).
        error = (got - dense[expert]).norm() / dense[expert].norm()
        assert 0.08 < float(error) < 0.11


def test_the_nvfp4_reference_is_a_dense_layer_up_to_quantization() -> None:
    shape = Shape("small", 4, 2, 256, 128)
    exact = reference_fp64(made("bf16", shape, 16))
    ours = reference_fp64(made("nvfp4", shape, 16))
    assert exact is not None
    assert ours is not None
    # docs/nvfp4.md derives 0.237 for a layer.
    assert 0.2 < float((ours - exact).norm() / exact.norm()) < 0.28


def plain_layer(x: Tensor, case: Case, fc1: Tensor, fc2: Tensor) -> Tensor:
    """float64, token by token."""
    out = torch.zeros(x.shape[0], fc2.shape[1], dtype=torch.float64)
    for token, (experts, scales) in enumerate(
        zip(case.tensors["token_selected_experts"].tolist(), case.tensors["token_final_scales"], strict=True)
    ):
        for expert, scale in zip(experts, scales.double(), strict=True):
            hidden = fc1[expert] @ x[token]
            up, gate = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
            out[token] += scale * (fc2[expert] @ (silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_reference_is_the_layer(dtype: str) -> None:
    case = made(dtype)
    t = case.tensors
    expected = plain_layer(
        t["input"].double(), case, t["fc1_expert_weights"].double(), t["fc2_expert_weights"].double()
    )
    got = reference_fp64(case)
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_the_fp8_reference_is_the_dense_layer_up_to_fp8() -> None:
    case = made("fp8")
    dense = made("bf16").tensors
    got = reference_fp64(case)
    assert got is not None
    exact = plain_layer(
        _tokens(case), case, dense["fc1_expert_weights"].double(), dense["fc2_expert_weights"].double()
    )
    # E4M3 has three mantissa bits: an error of 2^-4 at most, of about 0.026 root mean square, four operands.
    assert 0.02 < float((got - exact).norm() / exact.norm()) < 0.08


def _tokens(case: Case) -> Tensor:
    return case.tensors["input"].double() * case.tensors["quant_scales[3]"].double()


def test_flashinfers_own_reference_agrees() -> None:
    """Its host-side reference of this kernel, in bf16: the order of up and gate, experts and scales."""
    templates = importlib.import_module("flashinfer.trace.templates.moe")
    theirs = getattr(templates, "_cutlass_fused_moe_reference", None)
    if theirs is None:
        pytest.skip("this FlashInfer ships no reference of cutlass_fused_moe")
    case = made("bf16", tokens=16)
    names = (
        "input",
        "token_selected_experts",
        "token_final_scales",
        "fc1_expert_weights",
        "fc2_expert_weights",
    )
    expected = theirs(*(case.tensors[name] for name in names)).double()
    got = reference_fp64(case)
    assert got is not None
    assert float((got - expected).norm() / got.norm()) < 0.01


@pytest.mark.parametrize(
    ("parameters", "tensors"),
    [
        ({"activation_type": "Geglu"}, {}),
        ({"ep_size": 2}, {}),
        ({}, {"swiglu_alpha": torch.ones(6)}),
        ({}, {"fc1_expert_biases": torch.ones(6, 256)}),
    ],
)
def test_there_is_no_reference_for_another_computation(
    parameters: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    case = made("bf16")
    assert reference_fp64(case) is not None
    changed = dataclasses.replace(
        case, parameters={**case.parameters, **parameters}, tensors={**case.tensors, **tensors}
    )
    assert reference_fp64(changed) is None


def test_sizes_that_tma_cannot_move_are_refused() -> None:
    with pytest.raises(UsageError, match="intermediate size that 32 divides"):
        made("nvfp4", Shape("bad", 2, 1, 64, 48))


def test_only_unquantized_nvfp4_input_is_quantized() -> None:
    with pytest.raises(Unsupported, match="no input"):
        quantize_input(made("bf16"))
    with pytest.raises(Unsupported, match="no input"):
        quantize_input(quantize_input(made("nvfp4")))


def test_the_same_shape_gives_the_same_case() -> None:
    first, second = made("nvfp4").tensors, made("nvfp4").tensors
    assert all(torch.equal(first[name], second[name]) for name in first)
