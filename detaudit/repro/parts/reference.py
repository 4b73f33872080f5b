"""The mixture of experts in plain torch, with a finalize that races and one in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from detaudit.kernels.reference import reference_moe
from detaudit.repro.parts.case import Saved
from detaudit.repro.parts.errors import Unsupported
from detaudit.repro.parts.measure import Run

SERIAL_ELEMENTS = 32768
"""torch adds on a single thread below this many (at::internal::GRAIN_SIZE)."""


class ReferenceMoe:
    """On the device it was captured on; on a CPU where there is no GPU."""

    racy = 'finalize="atomic"'
    stable = 'finalize="ordered"'
    switch = "--ordered"

    def __init__(self, saved: Saved) -> None:
        cuda = saved.device.type == "cuda" and torch.cuda.is_available()
        self.case = saved.on(saved.device if cuda else torch.device("cpu"))
        x, top_k = self.case.tensors["x"], self.case.tensors["token_selected_experts"].shape[-1]
        if top_k <= 2:
            raise Unsupported(f"with top_k {top_k} the order of additions cannot show")
        if not x.is_cuda and (torch.get_num_threads() == 1 or x.numel() * top_k < SERIAL_ELEMENTS):
            raise Unsupported("torch adds this few terms, or with one thread, in a fixed order")

    def run(self, *, stable: bool) -> Run:
        accumulate = self.case.parameters.get("accumulate", "fp32")
        out = torch.empty_like(self.case.tensors["x"], memory_format=torch.contiguous_format)

        def once() -> Sequence[Tensor]:
            arguments = dict(self.case.tensors)
            finalize = "ordered" if stable else "atomic"
            reference_moe(**arguments, finalize=finalize, accumulate=accumulate, out=out)  # type: ignore[arg-type]
            return (out,)

        return once
