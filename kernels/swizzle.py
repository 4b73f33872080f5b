"""The 128x4 layout in which block-scaled CUTLASS kernels read scale factors.

Scales are cut into tiles of 128 rows and 4 columns (512 bytes, one after another along a row of tiles).
Within a tile the byte of row r and column c lies at ``(r % 32) * 16 + (r // 32) * 4 + c``: 32 lines of
16 bytes, each holding four rows that are 32 apart. Source: ``get_sf_out_offset_128x4`` in FlashInfer's
quantization_utils.cuh.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from detaudit.core.errors import UsageError

TILE_ROWS = 128
TILE_COLUMNS = 4
_LINES = 32


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Linear scales to the 128x4 layout; padding is zero.

    Args:
        scales: [..., R, C] of a one-byte dtype (E4M3 or UE8M0 codes as uint8).

    Returns:
        [..., R padded to 128, C padded to 4], contiguous. The shape is nominal, as in FlashInfer: the bytes
        are in tile order.
    """
    rows, columns = scales.shape[-2:]
    full_rows, full_columns = padded_shape(rows, columns)
    full = pad(scales, (0, full_columns - columns, 0, full_rows - rows))
    tiles = full.reshape(-1, full_rows // TILE_ROWS, 4, _LINES, full_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(full.shape)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle`, without the padding.

    Args:
        swizzled: the bytes in tile order, as the two last dimensions that `swizzle` returns or as a flat one.
        rows, columns: of the linear scales.

    Returns:
        [..., rows, columns].

    Raises:
        UsageError: the sizes do not fit together.
    """
    full_rows, full_columns = padded_shape(rows, columns)
    lead = _leading(swizzled, full_rows, full_columns)
    tiles = swizzled.reshape(
        -1, full_rows // TILE_ROWS, full_columns // TILE_COLUMNS, _LINES, 4, TILE_COLUMNS
    )
    linear = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, full_rows, full_columns)
    return linear[..., :rows, :columns].contiguous()


def _leading(swizzled: Tensor, full_rows: int, full_columns: int) -> tuple[int, ...]:
    if swizzled.dim() >= 2 and tuple(swizzled.shape[-2:]) == (full_rows, full_columns):
        return tuple(swizzled.shape[:-2])
    if swizzled.dim() >= 1 and swizzled.shape[-1] == full_rows * full_columns:
        return tuple(swizzled.shape[:-1])
    raise UsageError(
        f"swizzled scales of shape {tuple(swizzled.shape)} do not hold {full_rows} x {full_columns} bytes; "
        "pass the rows and columns of the linear scales"
    )
