"""From the kernel calls of a run to kernel reports: one call is kept as a case and rerun under variants."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from detaudit.core.recording import KernelCall
from detaudit.core.records import Finding, KernelReport, Origin, Report
from detaudit.execution import Session
from detaudit.hooks import flashinfer_state
from detaudit.hooks.functions import FunctionTap
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import all_backends, backend_for, confirm, unsupported_report
from detaudit.kernels.flashinfer_cutlass import FlashInferCutlass
from detaudit.options import Options
from detaudit.progress import Counted, Progress

CallKey = tuple[str, int]

ENTRIES = (flashinfer_state.CUTLASS_MOE, "detaudit.kernels.reference:reference_moe")


class FirstOf:
    """Says which tapped calls to keep: the first of each entry that lies in an origin, or anywhere.

    An origin is a module's call. A kernel called by that module itself belongs to it only if the ordinals
    agree; of a module inside, any call may.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        self.calls = {origin.module: origin.call for origin in origins}
        self.kept: set[str] = set()

    def __call__(self, entry: str, at: CallKey) -> bool:
        if entry in self.kept or not self._lies_inside(at):
            return False
        self.kept.add(entry)
        return True

    def _lies_inside(self, at: CallKey) -> bool:
        module, ordinal = at
        if not self.calls:
            return True
        if module in self.calls:
            return self.calls[module] == ordinal
        return any(not path or module.startswith(f"{path}.") for path in self.calls)


def confirm_kernels(
    session: Session, report: Report, options: Options, progress: Progress, folder: Path
) -> tuple[list[KernelReport], list[Finding]]:
    """Rerun the kernels called in the report's origins; those called anywhere where it has none.

    Args:
        folder: where cases are saved, ``<folder>/case-<module>``.
    """
    loaded = [entry for entry in ENTRIES if entry.partition(":")[0] in sys.modules]
    if not loaded or not options.confirm or report.verdict == "inconclusive":
        return [], []
    progress.describe("looking for kernel calls")
    tap = FunctionTap(
        loaded,
        session.recorder.current_call,
        keep=FirstOf(report.origins),
        keep_bytes=options.capture_bytes,
        context=flashinfer_state.contexts(),
    )
    session.execute(condition="tap", around=tap)
    cases = [_as_tuned_now(Case.from_kernel_call(call)) for call in tap.calls if _is_kept(call)]
    for case in cases:
        progress.describe(f"saving the case {case.name}")
        case.save(folder / f"case-{case.name.replace('/', '_')}")
    reports = confirm(
        cases,
        runs=options.kernel_runs,
        progress=Counted(progress),
    )
    reports += _not_kept(tap.calls)
    return reports, [finding for kernel in reports for finding in _not_run(kernel, report)]


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


def _not_kept(calls: Sequence[KernelCall]) -> Iterator[KernelReport]:
    """Calls that were to become a case and could not: too large, or inside a CUDA graph capture."""
    for call in calls:
        if (reason := call.context.get("not_kept")) is not None:
            name = f"{call.module or 'root'}#{call.call}"
            advice = f"{reason}; a larger --capture-bytes keeps more" if "limit" in str(reason) else reason
            yield unsupported_report(name, call.module, "none", f"the call was not kept: {advice}")


def _not_run(kernel: KernelReport, report: Report) -> list[Finding]:
    """``fused-not-run``: the call may take the fused finalize and did not, so it could not differ."""
    asked = next((variant for variant in kernel.variants if variant.name == kernel.asked), None)
    if report.origins or asked is None or asked.fused is not False or not asked.can_fuse:
        return []
    tactic = f" (tactic: {asked.tactic})" if asked.tactic else ""
    message = (
        f"{kernel.case} did not differ, because the fused finalize did not run{tactic}; its settings "
        "allow it, and autotuning may pick it on another day"
    )
    return [Finding("fused-not-run", kernel.module, message)]
