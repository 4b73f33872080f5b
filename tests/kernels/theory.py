"""What NVFP4 should cost in accuracy, from the definition of the format and independent quantization errors.

The derivation is in docs/nvfp4.md. Nothing here uses the codec under test.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
BLOCK = 16


def nearest(magnitudes: Tensor) -> Tensor:
    """The E2M1 magnitude nearest to each value (ties have probability zero here)."""
    return GRID[torch.searchsorted((GRID[1:] + GRID[:-1]) / 2, magnitudes.contiguous())]


def e4m3(x: Tensor) -> Tensor:
    """Positive values rounded to E4M3's three mantissa bits (normal range)."""
    step = 2.0 ** (torch.floor(torch.log2(x)) - 3)
    return torch.round(x / step) * step


def gaussian_noise(amax: float) -> float:
    """Relative RMS error of NVFP4 on independent Gaussian values, the tensor's largest being ``amax`` sigma.

    A block's largest magnitude m has density 16 F(m)^15 p(m), where p and F are the half-normal density and
    distribution; the other 15 values are half-normal below m. The step is E4M3(448 m / amax) * amax / 2688.
    """
    root2 = math.sqrt(2.0)
    m = torch.linspace(0.3, amax, 1500, dtype=torch.float64)
    x = torch.linspace(0.0, amax, 4001, dtype=torch.float64)
    density = 2 * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = torch.erf(m / root2)
    weight = BLOCK * below ** (BLOCK - 1) * 2 * torch.exp(-(m**2) / 2) / math.sqrt(2 * math.pi)
    step = e4m3(448 * m / amax) * amax / 2688
    error = (x - step[:, None] * nearest(x / step[:, None])) ** 2 * density * (x <= m[:, None])
    others = torch.trapezoid(error, x, dim=1) / below
    largest = (m - step * nearest(m / step)) ** 2
    total = torch.trapezoid(weight * ((BLOCK - 1) * others + largest), m) / torch.trapezoid(weight, m)
    return math.sqrt(total.item() / BLOCK)


def sampled_noise(values: Tensor) -> float:
    """Relative RMS error of NVFP4 on a sample, [..., multiple of 16], by the plain definition."""
    blocks = values.double().reshape(-1, BLOCK)
    amax = blocks.abs().max()
    step = e4m3((448 * blocks.abs().amax(1, keepdim=True) / amax).clamp(min=2.0**-6)) * amax / 2688
    restored = blocks.sign() * step * nearest(blocks.abs() / step)
    return float((restored - blocks).norm() / blocks.norm())


def combine(*relative: float) -> float:
    """Relative error of a product of independent factors: sqrt(prod(1 + r^2) - 1)."""
    return math.sqrt(math.prod(1 + r * r for r in relative) - 1)


def swiglu_error(relative: float, samples: int = 1 << 20) -> float:
    """Relative error of u * silu(g) for unit Gaussian u and g, each with an independent relative error."""
    u, g, du, dg = _gaussians(samples)
    exact = u * torch.nn.functional.silu(g)
    moved = (u + relative * du) * torch.nn.functional.silu(g + relative * dg)
    return float((moved - exact).norm() / exact.norm())


def moe_error(noise: float, samples: int = 1 << 20) -> float:
    """Relative RMS error of an NVFP4 MoE layer with SwiGLU on unit Gaussian inputs, weights of variance 1/K.

    ``noise`` is that of weights and inputs. The first GEMM has combine(noise, noise) on up and on gate;
    SwiGLU passes it on; the product is quantized (``sampled_noise`` of it) and meets the weights of the
    second GEMM. The weighted sum over experts keeps the ratio, their errors being independent.
    """
    u, g, _, _ = _gaussians(samples)
    activation = swiglu_error(combine(noise, noise), samples)
    return combine(activation, sampled_noise(u * torch.nn.functional.silu(g)), noise)


def _gaussians(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, samples, generator=generator, dtype=torch.float64)
