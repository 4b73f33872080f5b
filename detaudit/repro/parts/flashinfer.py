"""FlashInfer's ``cutlass_fused_moe`` with a pinned tactic: one that finalizes in its epilogue, or none.

``use_fused_finalize`` only decides which tactics exist, and untuned the first is taken, which is an unfused
one. So the runner is asked how many there are, and the kernels that a tactic launches show whether it fuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from detaudit.kernels.flashinfer_call import Library, MoeCall
from detaudit.kernels.flashinfer_graph import takes_fused
from detaudit.kernels.flashinfer_tactics import Tactics, answering, runner_of
from detaudit.repro.parts.case import Case, Saved
from detaudit.repro.parts.errors import Unsupported
from detaudit.repro.parts.measure import Run

PROBES = 8
"""Runs that must not all agree for a tactic to count as fused where its kernels cannot be listed."""


class FlashInferMoe:
    """The captured call, with the finalize and the tactic pinned."""

    racy = "use_fused_finalize=True, a fused tactic"
    stable = "use_fused_finalize=False"
    switch = "--unfused"

    def __init__(self, saved: Saved) -> None:
        self.case: Any = saved.on(gpu())
        top_k = self.case.tensors["token_selected_experts"].shape[-1]
        if top_k <= 2:
            raise Unsupported(f"with top_k {top_k} the order of additions cannot show")
        self.library = Library()
        self.tactic = finalize_tactic(self.library, self.case)
        print(f"FlashInfer {self.library.version}: gemm2 tactic {self.tactic} finalizes in its epilogue")

    def run(self, *, stable: bool) -> Run:
        call = MoeCall(self.library, self.case, fused=not stable)
        tactics = Tactics() if stable else Tactics(gemm2=self.tactic)

        def once() -> Sequence[Tensor]:
            with answering(tactics):
                return (call(),)

        return once


def gpu() -> torch.device:
    """The current one. Raises Unsupported where there is none."""
    if not torch.cuda.is_available():
        raise Unsupported("it was captured on a CUDA GPU, and torch finds none here")
    return torch.device("cuda", torch.cuda.current_device())


def finalize_tactic(library: Library, case: Case) -> int:
    """The first GEMM2 tactic that takes the fused finalize, by its place in the runner's list.

    Raises:
        Unsupported: there is none for these weights on this GPU.
    """
    call: dict[bool, MoeCall] = {fused: MoeCall(library, case, fused=fused) for fused in (True, False)}  # type: ignore[arg-type]
    try:
        runners = {fused: runner_of(launch) for fused, launch in call.items()}
    except RuntimeError as error:
        raise Unsupported(" ".join(str(error).split())[:300]) from error
    count = {fused: int(runner.get_gemm2_tactic_count()) for fused, runner in runners.items()}
    first = int(runners[True].get_gemm1_tactic_count())
    if count[True] > count[False]:
        for gemm2 in range(first, first + count[True]):
            if _fuses(call[True], Tactics(gemm2=gemm2)):
                return gemm2
    raise Unsupported(
        f"no tactic fuses the finalize here (GEMM2 has {count[True]} tactics with use_fused_finalize and "
        f"{count[False]} without)"
    )


def _fuses(call: MoeCall, tactics: Tactics) -> bool:
    with answering(tactics):
        try:
            first = call().clone()
            fused = takes_fused(call)
            return fused if fused is not None else any(not torch.equal(call(), first) for _ in range(PROBES))
        except RuntimeError:  # this tactic does not run on this GPU; the next one may
            return False
