"""The axes along which a captured call can be made smaller: tokens, experts, hidden and intermediate size of
a mixture of experts; of an operator's arguments, every size that occurs in their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from detaudit.kernels.cases import Case
from detaudit.kernels.nvfp4 import BLOCK
from detaudit.kernels.swizzle import padded_shape, swizzle, unswizzle
from detaudit.repro.script import FLASHINFER, OPERATOR, kind_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Axis:
    """``cut(n)`` is the case with ``n`` in place of ``size``, for ``n`` a multiple of ``step``."""

    name: str
    size: int
    step: int
    smallest: int
    cut: Callable[[int], Case]

    def divided(self, factor: float) -> int:
        """``size / factor``, as far as the axis can go that way."""
        return max(self.smallest, int(self.size / factor) // self.step * self.step)


def elements(case: Case) -> int:
    """In all tensors of the case, as they are stored."""
    return sum(tensor.numel() for tensor in case.tensors.values())


def axes(case: Case) -> list[Axis]:
    """In the order in which to try them; empty where the layout of an argument is not known."""
    kind = kind_of(case.entry)
    if kind is OPERATOR:
        return _operator_axes(case)
    layout = _FLASHINFER if kind is FLASHINFER else _REFERENCE
    known = {*layout.tokens, *layout.fc1, *layout.fc2, *layout.per_expert}
    if set(case.tensors) - known or int(case.parameters.get("ep_size") or 1) > 1:
        return []
    return _moe_axes(case, layout)


def _with(case: Case, tensors: Mapping[str, Tensor]) -> Case:
    return dataclasses.replace(case, tensors={**case.tensors, **tensors})


# ---- a mixture of experts ----


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names of the tensors of one entry point: by token; (weight, block scales) of each GEMM; by expert.

    ``step``: what hidden and intermediate size must be multiples of.
    """

    tokens: tuple[str, str, str]
    fc1: tuple[str, str]
    fc2: tuple[str, str]
    per_expert: tuple[str, ...]
    step: int


_REFERENCE = _Layout(
    tokens=("x", "token_selected_experts", "token_final_scales"),
    fc1=("fc1_weight", "fc1_scale"),
    fc2=("fc2_weight", "fc2_scale"),
    per_expert=("fc1_global", "fc2_global", "a1_global", "a2_global"),
    step=BLOCK,
)
_FLASHINFER = _Layout(
    tokens=("input", "token_selected_experts", "token_final_scales"),
    fc1=("fc1_expert_weights", "quant_scales[1]"),
    fc2=("fc2_expert_weights", "quant_scales[4]"),
    per_expert=("quant_scales[0]", "quant_scales[2]", "quant_scales[3]", "quant_scales[5]"),
    # Multiples of 64 keep every operand aligned to what TMA and the GEMM tiles of any dtype ask for.
    step=64,
)
_PACKED = {torch.int64: 16, torch.uint8: 2}
"""4-bit values in one element of a weight."""


def _moe_axes(case: Case, layout: _Layout) -> list[Axis]:
    x, selected = case.tensors[layout.tokens[0]], case.tensors[layout.tokens[1]]
    fc2 = case.tensors[layout.fc2[0]]
    inner = fc2.shape[2] * _PACKED.get(fc2.dtype, 1)
    experts, top_k = fc2.shape[0], selected.shape[1]
    step = layout.step
    return [
        Axis("experts", experts, 1, min(experts, top_k), partial(_cut_experts, case, layout)),
        Axis("intermediate", inner, step, min(inner, step), partial(_cut_intermediate, case, layout)),
        Axis("hidden", x.shape[1], step, min(x.shape[1], step), partial(_cut_hidden, case, layout)),
        Axis("tokens", x.shape[0], 1, 1, partial(_cut_tokens, case, layout)),
    ]


def _cut_tokens(case: Case, layout: _Layout, size: int) -> Case:
    return _with(case, {name: case.tensors[name][:size].clone() for name in layout.tokens})


def _cut_experts(case: Case, layout: _Layout, size: int) -> Case:
    """The first experts; a token keeps its first one (modulo ``size``) and takes those that follow it."""
    experts = case.tensors[layout.fc2[0]].shape[0]
    names = [*layout.fc1, *layout.fc2, *layout.per_expert]
    held = {name: tensor for name in names if (tensor := case.tensors.get(name)) is not None}
    cut = {name: t[:size].clone() for name, t in held.items() if t.dim() and t.shape[0] == experts}
    selected = case.tensors[layout.tokens[1]]
    following = torch.arange(selected.shape[1], dtype=selected.dtype)
    return _with(case, cut | {layout.tokens[1]: (selected[:, :1] + following) % size})


def _cut_hidden(case: Case, layout: _Layout, size: int) -> Case:
    """Columns of the input and of fc1, rows of fc2."""
    x = case.tensors[layout.tokens[0]]
    tensors = {layout.tokens[0]: x[:, :size].contiguous()}
    tensors |= _cut_weight(case, layout.fc1, columns=size)
    tensors |= _cut_weight(case, layout.fc2, rows=torch.arange(size))
    return _with(case, tensors)


def _cut_intermediate(case: Case, layout: _Layout, size: int) -> Case:
    """Rows of fc1, of its up and its gate half alike; columns of fc2."""
    half = case.tensors[layout.fc1[0]].shape[1] // 2
    rows = torch.cat((torch.arange(size), half + torch.arange(size)))
    return _with(case, _cut_weight(case, layout.fc1, rows=rows) | _cut_weight(case, layout.fc2, columns=size))


def _cut_weight(
    case: Case, names: tuple[str, str], *, rows: Tensor | None = None, columns: int | None = None
) -> Tensors:
    """A weight [E, N, K] cut to some rows, or to its first columns, with its block scales if it has any."""
    weight, scales = case.tensors[names[0]], case.tensors.get(names[1])
    per_element = _PACKED.get(weight.dtype, 1)
    blocks = per_element > 1 and scales is not None
    whole = (weight.shape[1], weight.shape[2] * per_element // BLOCK)
    linear = _linear(scales, whole) if blocks and scales is not None else None
    if rows is not None:
        weight = weight[:, rows]
        linear = None if linear is None else linear[:, rows]
    if columns is not None:
        weight = weight[:, :, : columns // per_element]
        linear = None if linear is None else linear[:, :, : columns // BLOCK]
    cut = {names[0]: weight.contiguous()}
    if linear is not None and scales is not None:
        cut[names[1]] = swizzle(linear.contiguous()).view(scales.dtype)
    return cut


def _linear(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """Block scales uint8 [E, N, K/16] of the 128x4 layout, which may be viewed as wider integers."""
    codes = scales.contiguous().view(torch.uint8)
    return unswizzle(codes.reshape(codes.shape[0], *padded_shape(*shape)), *shape)


# ---- an operator ----


def _operator_axes(case: Case) -> list[Axis]:
    """Dimensions of equal size are taken for one axis. The smallest first: cut the other way round, one could
    come to the size of another, which it would then be taken for."""
    sizes = sorted({size for tensor in case.tensors.values() for size in tensor.shape if size > 1})
    return [Axis(f"size {size}", size, 1, 1, partial(_cut_size, case, size)) for size in sizes]


def _cut_size(case: Case, size: int, smaller: int) -> Case:
    """An index is taken to be one into the smallest axis that it fits."""
    sizes = sorted({s for tensor in case.tensors.values() for s in tensor.shape})
    cut: Tensors = {}
    for name, tensor in case.tensors.items():
        largest = _largest_index(tensor)
        if largest is not None and next((s for s in sizes if s > largest), None) == size:
            tensor = tensor % smaller
        for dim, extent in enumerate(tensor.shape):
            if extent == size:
                tensor = tensor.narrow(dim, 0, smaller)
        cut[name] = tensor.clone(memory_format=torch.contiguous_format)
    return _with(case, cut)


def _largest_index(tensor: Tensor) -> int | None:
    """``None`` for what cannot be an index."""
    if tensor.dtype not in (torch.int32, torch.int64) or not tensor.numel():
        return None
    return int(tensor.max())
