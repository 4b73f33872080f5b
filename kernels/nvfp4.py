"""The NVFP4 codec: E2M1 codes, one E4M3 scale per 16 values, one fp32 global scale.

A value is ``e2m1(code) * e4m3(scale) / global_scale``. E2M1 has a sign, two exponent bits with bias 1 and one
mantissa bit: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0, section 5.3.3). E4M3 is
``torch.float8_e4m3fn``: largest value 448, no infinity, NaN at 0x7f and 0xff.

Rounding is to nearest, ties to even, with saturation, as the PTX instructions ``cvt.rn.satfinite.e2m1x2.f32``
and ``cvt.rn.satfinite.e4m3x2.f32`` do. The arithmetic around it is FlashInfer's exact recipe (its
``cvt_warp_fp16_to_fp4`` with fast math off). With fast math on, its default, the GPU takes approximate
reciprocals, so a value beside a rounding boundary may get the neighbouring code.

Everything here is plain vectorized torch: it runs where its input lies, without a host synchronisation,
without lookup tables that would have to be copied to a device, and without touching any global state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from detaudit.core.errors import UsageError

BLOCK = 16
"""Values that share one E4M3 scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

_HALF_SHIFT = 2.0**14
"""E2M1 has exponent bias 1, fp16 has 15: the top bits of a value times 2^-14 in fp16 are its E2M1 code."""

LARGEST_SCALE = 2.0**126
"""Of a global scale, so that its reciprocal is a normal float32; the smallest, 2688 / 2^128, is safe."""


def global_scale(x: Tensor) -> Tensor:
    """The scale that maps the largest finite magnitude of ``x`` to the largest NVFP4 value: 448 * 6 / amax.

    Returns:
        0-d float32 on the device of ``x``, at most 2^126; 1 where no value is finite and non-zero.
    """
    magnitude = x.detach().float().abs()
    finite = torch.where(magnitude.isfinite(), magnitude, 0.0)
    amax = finite.amax() if finite.numel() else finite.new_zeros(())
    scale = (E4M3_MAX * E2M1_MAX / amax).clamp(max=LARGEST_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def round_e2m1(x: Tensor) -> Tensor:
    """The E2M1 value nearest to each element, ties to the even code; saturates at +-6; NaN becomes +6.

    Args:
        x: float32, any shape.

    Returns:
        float32 of the same shape. The sign of zero is kept, as E2M1 has two zeros.
    """
    bounded = x.nan_to_num(nan=E2M1_MAX, posinf=E2M1_MAX, neginf=-E2M1_MAX).clamp_(-E2M1_MAX, E2M1_MAX)
    magnitude = bounded.abs()
    # The grid is spaced 0.5 below 2, 1 below 4 and 2 above. An even code is an even multiple of the
    # spacing, so rounding half to even on the multiple is rounding half to even on the code.
    multiples = torch.where(magnitude < 2.0, 2.0, torch.where(magnitude < 4.0, 1.0, 0.5))
    return bounded.mul_(multiples).round_().div_(multiples)


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes (0..15, one a byte) of float32 values, rounded as `round_e2m1` does.

    Returns:
        uint8 of the same shape: bit 3 the sign, bits 2..1 the exponent, bit 0 the mantissa.
    """
    return _code_of_value(round_e2m1(x))


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes (uint8, one a byte, high nibble ignored)."""
    wide = codes.to(torch.int16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.view(torch.float16).float().mul_(_HALF_SHIFT)


def _code_of_value(value: Tensor) -> Tensor:
    bits = (value / _HALF_SHIFT).half().view(torch.int16)
    return (((bits >> 12) & 8) | ((bits >> 9) & 7)).to(torch.uint8)


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3 codes (uint8) of float32 values, to nearest even; infinities saturate to +-448, NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float32 values of E4M3 codes (uint8); 0x7f and 0xff are NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def pack(codes: Tensor) -> Tensor:
    """Two E2M1 codes a byte, the element of even index in the low nibble, as CUTLASS and FlashInfer read it.

    Args:
        codes: uint8 [..., K] with values 0..15, K even.

    Returns:
        uint8 [..., K/2].
    """
    if codes.shape[-1] % 2:
        raise UsageError(
            f"E2M1 codes are packed in pairs, but the last dimension is {codes.shape[-1]}; pad it"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: uint8 [..., K/2] to codes 0..15 in uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the last dimension of ``x`` to NVFP4.

    An infinity saturates to +-6 with the block scale at 448. NVFP4 has no NaN: a NaN becomes +6 and takes no
    part in its block's scale. A block whose scale rounds to zero is all zeros.

    Args:
        x: floating point [..., K], K a multiple of 16. Computed in float32.
        scale: the global scale, float32 in [2688 / 2^128, 2^126], 0-d or broadcastable to [..., K/16].

    Returns:
        (packed codes uint8 [..., K/2], E4M3 scale codes uint8 [..., K/16], linear layout).

    Raises:
        UsageError: K is not a multiple of 16.
    """
    values, scales = quantize_values(x, scale)
    return pack(_code_of_value(values)), scales


def quantize_values(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` with codes given as their E2M1 values: (float32 [..., K], scale codes uint8 [..., K/16])."""
    blocks = _blocks(x)
    magnitude = blocks.abs()
    amax = torch.where(magnitude.isnan(), 0.0, magnitude).amax(-1)
    # An infinite amax times a small scale must still saturate, so nothing here may turn it into NaN.
    scales = encode_e4m3(amax * (scale * (1.0 / E2M1_MAX)))
    decoded = decode_e4m3(scales)
    inverse = (1.0 / (decoded * (1.0 / scale))).clamp(max=torch.finfo(torch.float32).max)
    inverse = torch.where(decoded == 0, 0.0, inverse)
    return round_e2m1(blocks * inverse.unsqueeze(-1)).view(x.shape), scales


def dequantize(packed: Tensor, scales: Tensor, scale: Tensor | None = None) -> Tensor:
    """float32 [..., K] of NVFP4 data; without ``scale`` the product of code and block scale, which is exact.

    Args:
        packed: uint8 [..., K/2].
        scales: E4M3 codes uint8 [..., K/16], linear layout.
        scale: the global scale given to `quantize`.
    """
    return scale_blocks(decode_e2m1(unpack(packed)), scales, scale)


def scale_blocks(values: Tensor, scales: Tensor, scale: Tensor | None = None) -> Tensor:
    """E2M1 values [..., K] times their block scales (E4M3 codes [..., K/16]), divided by ``scale``."""
    blocks = _blocks(values) * decode_e4m3(scales).unsqueeze(-1)
    if scale is not None:
        blocks = blocks / scale.unsqueeze(-1)
    return blocks.flatten(-2)


def _blocks(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK:
        raise UsageError(
            f"NVFP4 scales {BLOCK} values at a time, but the last dimension is {x.shape[-1]}; "
            f"pad it to a multiple of {BLOCK}"
        )
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
