"""Kernel calls of a run, kept as cases: what the confirmation reruns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from detaudit.core.recording import CallKey, KernelCall
from detaudit.core.records import KernelReport
from detaudit.hooks import flashinfer_state
from detaudit.hooks.functions import FunctionTap
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import all_backends, backend_for, unsupported_report
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass

ENTRIES = (flashinfer_state.CUTLASS_MOE, "detaudit.kernels.reference:reference_moe")


class FirstOf:
    """Says which tapped calls to keep: the first of each entry that lies in an origin, or anywhere.

    An origin is a module's call (``origins``: path to ordinal, or None for any). A kernel called by that
    module itself belongs to it only if the ordinals agree; of a module inside, any call may.
    """

    def __init__(self, origins: Mapping[str, int | None]) -> None:
        self.origins = dict(origins)
        self.kept: set[str] = set()

    def __call__(self, entry: str, at: CallKey) -> bool:
        if entry in self.kept or not self._lies_inside(at):
            return False
        self.kept.add(entry)
        return True

    def _lies_inside(self, at: CallKey) -> bool:
        module, ordinal = at
        if not self.origins:
            return True
        if module in self.origins:
            return self.origins[module] in (None, ordinal)
        return any(not path or module.startswith(f"{path}.") for path in self.origins)


def kernel_tap(
    current_call: Callable[[], CallKey | None], origins: Mapping[str, int | None], keep_bytes: int
) -> FunctionTap:
    """A tap that keeps one call of each known kernel, with what is needed to rerun it."""
    return FunctionTap(
        ENTRIES,
        current_call,
        keep=FirstOf(origins),
        keep_bytes=keep_bytes,
        context=flashinfer_state.contexts(),
    )


def save_cases(calls: Sequence[KernelCall], folder: Path) -> list[Case]:
    """Save the calls that were kept as ``<folder>/case-<module>#<call>``, in the process that made them."""
    cases = [_as_tuned_now(Case.from_kernel_call(call)) for call in calls if _is_kept(call)]
    for case in cases:
        case.save(folder / f"case-{case.name.replace('/', '_')}")
    return cases


def not_kept(calls: Sequence[KernelCall]) -> Iterator[KernelReport]:
    """Calls that were to become a case and could not: too large, or inside a CUDA graph capture."""
    for call in calls:
        if (reason := call.context.get("not_kept")) is not None:
            name = f"{call.module or 'root'}#{call.call}"
            advice = f"{reason}; a larger --capture-bytes keeps more" if "limit" in str(reason) else reason
            yield unsupported_report(name, call.module, "none", f"the call was not kept: {advice}")


def _as_tuned_now(case: Case) -> Case:
    """A FlashInfer case with the tactics its call takes: this process is tuned as it was for the call."""
    backend = backend_for(case, all_backends())
    if not isinstance(backend, FlashInferCutlass):
        return case
    try:
        return backend.noted(case)
    except Exception:  # whatever FlashInfer objects to is shown when the case is rerun
        return case


def _is_kept(call: KernelCall) -> bool:
    return bool(call.tensors) and all(isinstance(t, torch.Tensor) for t in call.tensors.values())
