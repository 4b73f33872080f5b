"""The 128x4 scale layout against the offset formula, one byte at a time, and against FlashInfer's helpers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from detaudit.core.errors import UsageError
from detaudit.kernels.swizzle import padded_shape, swizzle, unswizzle

SHAPES = [(1, 1), (128, 4), (127, 3), (129, 5), (256, 8), (300, 33), (512, 2)]


def offset(row: int, column: int, columns: int) -> int:
    """Byte of (row, column): tiles of 128 x 4, row-block major; lines of 16 bytes hold four rows each."""
    tile = (row // 128) * (-(-columns // 4)) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def random_scales(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_byte_lies_where_the_formula_says(rows: int, columns: int) -> None:
    scales = random_scales(rows, columns)
    expected = bytearray(padded_shape(rows, columns)[0] * padded_shape(rows, columns)[1])
    for r in range(rows):
        for c in range(columns):
            expected[offset(r, c, columns)] = int(scales[r, c])
    swizzled = swizzle(scales)
    assert swizzled.shape == padded_shape(rows, columns)
    assert bytes(swizzled.flatten().tolist()) == bytes(expected)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unswizzle_undoes_swizzle(rows: int, columns: int) -> None:
    scales = random_scales(rows, columns)
    swizzled = swizzle(scales)
    assert torch.equal(unswizzle(swizzled, rows, columns), scales)
    assert torch.equal(unswizzle(swizzled.flatten(), rows, columns), scales)


def test_experts_are_swizzled_one_by_one() -> None:
    scales = random_scales(3, 130, 6)
    swizzled = swizzle(scales)
    assert swizzled.shape == (3, 256, 8)
    assert all(torch.equal(swizzled[e], swizzle(scales[e])) for e in range(3))
    assert torch.equal(unswizzle(swizzled, 130, 6), scales)
    assert torch.equal(unswizzle(swizzled.flatten(1), 130, 6), scales)


def test_padding_is_zero() -> None:
    swizzled = swizzle(random_scales(130, 5))
    assert int((swizzled != 0).sum()) == 130 * 5


def test_whole_tiles_are_not_aliased() -> None:
    scales = random_scales(128, 4)
    before = scales.clone()
    swizzle(scales).zero_()
    assert torch.equal(scales, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_gives_the_same_bytes() -> None:
    scales = random_scales(2, 300, 33)
    swizzled = swizzle(scales.cuda())
    assert swizzled.is_cuda
    assert torch.equal(swizzled.cpu(), swizzle(scales))
    assert torch.equal(unswizzle(swizzled, 300, 33).cpu(), scales)


def test_a_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="do not hold 128 x 8"):
        unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 128, 5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_agrees(rows: int, columns: int) -> None:
    helpers = flashinfer_module("diffusion_ops.minimax_h3_fc1_swiglu")
    scales = random_scales(rows, columns)
    swizzled = swizzle(scales)
    assert torch.equal(swizzled.flatten(), helpers._swizzle_sf_128x4(scales))
    assert torch.equal(helpers._unswizzle_sf_128x4(swizzled.flatten(), rows, columns), scales)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_reads_a_batch_as_we_write_it() -> None:
    helpers = flashinfer_module("trace.templates.gemm")
    scales = random_scales(3, 130, 6)
    assert torch.equal(helpers._unswizzle_batched_sf_128x4(swizzle(scales), 3, 130, 6), scales)


def flashinfer_module(name: str) -> Any:
    try:
        module = importlib.import_module(f"flashinfer.{name}")
    except ImportError as error:
        pytest.skip(f"FlashInfer's {name} does not load here: {error}")
    if not any(hasattr(module, f"_unswizzle{kind}sf_128x4") for kind in ("_", "_batched_")):
        pytest.skip(f"this FlashInfer has no 128x4 helpers in {name}")
    return module
