"""Smaller cases are valid calls, and what is left of them is what it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from detaudit.kernels import nvfp4
from detaudit.kernels.cases import Case
from detaudit.kernels.flashinfer_synthetic import quantize_input, synthetic_case
from detaudit.kernels.reference import reference_moe
from detaudit.kernels.reference_backend import ReferenceBackend, _arguments
from detaudit.kernels.shapes import Shape, Synthetic
from detaudit.kernels.swizzle import unswizzle
from detaudit.repro.shrink import Axis, axes, elements
from tests.repro.scripts import reference_case

CPU = torch.device("cpu")


def axis(case: Case, name: str) -> Axis:
    return next(axis for axis in axes(case) if axis.name == name)


def flashinfer_case(dtype: str) -> Case:
    shape = Shape("small", experts=8, top_k=4, hidden=256, intermediate=128)
    return synthetic_case(Synthetic(shape, tokens=16, dtype=dtype), CPU)


def output(case: Case) -> Tensor:
    return reference_moe(**_arguments(case), finalize="ordered")  # type: ignore[arg-type]


def dense(case: Case, gemm: str) -> Tensor:
    """A weight of the case, dequantized without its global scale."""
    arguments = _arguments(case)
    packed, scales = arguments[f"{gemm}_weight"], arguments[f"{gemm}_scale"]
    rows, columns = packed.shape[1], packed.shape[2] * 2
    linear = unswizzle(scales.reshape(packed.shape[0], -1), rows, columns // nvfp4.BLOCK)
    return nvfp4.dequantize(packed, linear)


@pytest.fixture(params=["reference", "flashinfer"])
def case(request: pytest.FixtureRequest) -> Case:
    return (
        reference_case(tokens=16, hidden=256, intermediate=128)
        if request.param == "reference"
        else flashinfer_case("nvfp4")
    )


def test_the_axes_and_how_far_they_go(case: Case) -> None:
    found = {axis.name: (axis.size, axis.smallest) for axis in axes(case)}
    step = 16 if "x" in case.tensors else 64
    assert found == {"experts": (8, 4), "intermediate": (128, step), "hidden": (256, step), "tokens": (16, 1)}
    hidden = axis(case, "hidden")
    assert hidden.divided(2.0) == 128
    assert hidden.divided(4.0 / 3.0) == 192
    assert hidden.divided(1000.0) == step


def test_fewer_tokens_keep_theirs(case: Case) -> None:
    smaller = axis(case, "tokens").cut(5)
    assert elements(smaller) < elements(case)
    assert torch.equal(output(smaller), output(case)[:5])


def test_fewer_experts_are_the_first_ones_and_a_token_has_none_twice(case: Case) -> None:
    smaller = axis(case, "experts").cut(5)
    chosen = smaller.tensors["token_selected_experts"]
    assert int(chosen.max()) < 5
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert torch.equal(chosen[:, 0], case.tensors["token_selected_experts"][:, 0] % 5)
    assert torch.equal(dense(smaller, "fc1"), dense(case, "fc1")[:5])
    assert output(smaller).shape == output(case).shape


def test_a_smaller_hidden_size(case: Case) -> None:
    smaller = axis(case, "hidden").cut(128)
    assert torch.equal(dense(smaller, "fc1"), dense(case, "fc1")[:, :, :128])
    assert torch.equal(dense(smaller, "fc2"), dense(case, "fc2")[:, :128])
    assert output(smaller).shape == (16, 128)


def test_a_smaller_intermediate_size_cuts_up_and_gate_alike(case: Case) -> None:
    smaller = axis(case, "intermediate").cut(64)
    whole = dense(case, "fc1")
    assert torch.equal(dense(smaller, "fc1"), torch.cat((whole[:, :64], whole[:, 128:192]), dim=1))
    assert torch.equal(dense(smaller, "fc2"), dense(case, "fc2")[:, :, :64])
    assert bool(output(smaller).isfinite().all())


def test_all_axes_after_one_another(case: Case) -> None:
    smaller = case
    for name, size in (("tokens", 3), ("hidden", 64), ("experts", 4), ("intermediate", 64)):
        smaller = axis(smaller, name).cut(size)
    assert output(smaller).shape == (3, 64)
    assert all(tensor.is_contiguous() for tensor in smaller.tensors.values())
    assert not axis(smaller, "experts").divided(2.0) < 4


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_weights_without_block_scales(dtype: str) -> None:
    case = flashinfer_case(dtype)
    smaller = axis(axis(axis(case, "hidden").cut(64), "intermediate").cut(64), "experts").cut(4)
    shapes = {name: tuple(tensor.shape) for name, tensor in smaller.tensors.items()}
    assert shapes["input"] == (16, 64)
    assert shapes["fc1_expert_weights"] == (4, 128, 64)
    assert shapes["fc2_expert_weights"] == (4, 64, 64)
    if dtype == "fp8":
        assert (shapes["quant_scales[0]"], shapes["quant_scales[1]"]) == ((4,), ())
    before, after = case.tensors["fc2_expert_weights"], smaller.tensors["fc2_expert_weights"]
    assert torch.equal(after.view(torch.uint8), before[:4, :64, :64].contiguous().view(torch.uint8))


def test_what_is_not_understood_is_left_alone() -> None:
    assert axes(quantize_input(flashinfer_case("nvfp4"))) == []
    case = flashinfer_case("bf16")
    split = Case(case.name, case.entry, case.tensors, {**case.parameters, "ep_size": 2})
    assert axes(split) == []


def operator_case() -> Case:
    tensors = {
        "args[0]": torch.zeros(256, 512),
        "args[1][0]": torch.arange(2048) % 256,
        "args[2]": torch.randn(2048, 512),
    }
    arguments = [{"tensor": "args[0]"}, [{"tensor": "args[1][0]"}], {"tensor": "args[2]"}, True]
    parameters = {"args": arguments, "kwargs": {}, "written": ["args[0]"]}
    return Case("put", "torch.ops:aten.index_put_.default", tensors, parameters)


def test_an_operators_axes_are_the_sizes_in_its_shapes() -> None:
    case = operator_case()
    assert [(axis.name, axis.size) for axis in axes(case)] == [
        ("size 256", 256), ("size 512", 512), ("size 2048", 2048)
    ]  # fmt: skip
    rows = axis(case, "size 256").cut(16)
    assert rows.tensors["args[0]"].shape == (16, 512)
    assert torch.equal(rows.tensors["args[1][0]"], torch.arange(2048) % 16)
    columns = axis(case, "size 512").cut(8)
    assert columns.tensors["args[2]"].shape == (2048, 8)
    assert torch.equal(columns.tensors["args[1][0]"], case.tensors["args[1][0]"])
    fewer = axis(case, "size 2048").cut(100)
    assert [tuple(tensor.shape) for tensor in fewer.tensors.values()] == [(256, 512), (100,), (100, 512)]


def test_a_reference_case_still_runs_on_its_backend() -> None:
    smaller = axis(reference_case(), "hidden").cut(16)
    assert ReferenceBackend().accepts(smaller)
    assert output(smaller).shape == (64, 16)
