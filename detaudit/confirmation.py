"""From the kernel calls of a run to kernel reports: one call is kept as a case and rerun under variants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from detaudit.core.recording import KernelCall
from detaudit.core.records import Finding, KernelReport, Report
from detaudit.execution import Session
from detaudit.hooks.functions import FunctionTap
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import confirm
from detaudit.options import Options
from detaudit.progress import Progress

CallKey = tuple[str, int]

ENTRIES = ("flashinfer.fused_moe:cutlass_fused_moe", "detaudit.kernels.reference:reference_moe")


class _FirstOf:
    """Says which tapped calls to keep: the first of each entry that lies in one of ``modules``."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self.kept: set[str] = set()

    def __call__(self, entry: str, at: CallKey) -> bool:
        inside = any(at[0] == path or not path or at[0].startswith(f"{path}.") for path in self.modules)
        if not inside or entry in self.kept:
            return False
        self.kept.add(entry)
        return True


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
    keep = _FirstOf([origin.module for origin in report.origins] or [""])
    tap = FunctionTap(loaded, session.recorder.current_call, keep=keep, keep_bytes=options.capture_bytes)
    session.execute(condition="tap", around=tap)
    cases = [Case.from_kernel_call(call) for call in tap.calls if _is_kept(call)]
    for case in cases:
        case.save(folder / f"case-{case.name.replace('/', '_')}")
    reports = confirm(
        cases,
        runs=options.kernel_runs,
        progress=lambda what, done, total: progress.describe(f"{what}: {done} of {total}"),
    )
    return reports, [finding for kernel in reports for finding in _not_run(kernel, report)]


def _is_kept(call: KernelCall) -> bool:
    import torch

    return bool(call.tensors) and all(isinstance(t, torch.Tensor) for t in call.tensors.values())


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
