"""From the kernel calls of a run to kernel reports: one call of each kernel is rerun under its variants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from detaudit.core.options import Options
from detaudit.core.records import Finding, KernelReport, Report
from detaudit.execution import Session
from detaudit.kernel_calls import ENTRIES, kernel_tap, not_kept, save_cases
from detaudit.kernels.cases import Case
from detaudit.kernels.confirm import confirm
from detaudit.progress import Counted, Progress


def confirm_kernels(
    session: Session, report: Report, options: Options, progress: Progress, folder: Path
) -> tuple[list[KernelReport], list[Finding]]:
    """Rerun the kernels called in the report's origins; those called anywhere where it has none.

    Args:
        folder: where cases are saved.
    """
    loaded = any(entry.partition(":")[0] in sys.modules for entry in ENTRIES)
    if not loaded or not options.confirm or report.verdict == "inconclusive":
        return [], []
    progress.describe("looking for kernel calls")
    tap = kernel_tap(session.recorder.current_call, origin_calls(report), options.capture_bytes)
    session.execute(condition="tap", around=tap)
    cases = save_cases(tap.calls, folder)
    return confirm_cases(cases, list(not_kept(tap.calls)), report, options, progress)


def confirm_cases(
    cases: Sequence[Case],
    missing: Sequence[KernelReport],
    report: Report,
    options: Options,
    progress: Progress,
) -> tuple[list[KernelReport], list[Finding]]:
    """Rerun cases under their variants. ``missing``: reports on the calls that could not be kept."""
    reports = [*confirm(cases, runs=options.kernel_runs, progress=Counted(progress)), *missing]
    return reports, [finding for kernel in reports for finding in _not_run(kernel, report)]


def origin_calls(report: Report) -> dict[str, int]:
    """Path of each origin's module to the ordinal of its call."""
    return {origin.module: origin.call for origin in report.origins}


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
