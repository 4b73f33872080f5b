"""From the trace to the report: the comparison, and what a closer look adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from detaudit.compare import analyze
from detaudit.compare.origins import is_guess
from detaudit.core.recording import CallKey, ModuleInfo
from detaudit.core.records import Finding, KernelReport, Origin, Report
from detaudit.trace import TraceWriter, open_trace


def key_of(origin: Origin) -> CallKey:
    return origin.module, origin.call


def analyze_trace(writer: TraceWriter, meta: Mapping[str, Any]) -> Report:
    """Store what the audit knows about the runs, and compare them."""
    for key, value in meta.items():
        writer.set_meta(key, value)
    with open_trace(writer.path) as trace:
        return analyze(trace)


def coverage(modules: Sequence[ModuleInfo], wanted: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """What was looked at: all modules of the built model, how many of them are recorded, and notes."""
    return {
        "modules": [{"path": module.path, "class": module.cls} for module in modules],
        "recorded": len(wanted),
        "aliases": {module.path: list(module.aliases) for module in modules if module.aliases},
        "notes": list(notes),
    }


def merge(
    report: Report,
    *,
    examined: Mapping[CallKey, Origin],
    findings: Sequence[Finding] = (),
    kernels: Sequence[KernelReport] = (),
) -> Report:
    """The report with what was measured on its origins, and with further findings and kernels."""
    origins = tuple(_with_numbers(origin, examined.get(key_of(origin))) for origin in report.origins)
    known = {(finding.kind, finding.module) for finding in report.findings}
    new = tuple(finding for finding in findings if (finding.kind, finding.module) not in known)
    return replace(report, origins=origins, findings=report.findings + new, kernels=tuple(kernels))


def _why(origin: Origin, examined: Origin) -> str | None:
    """What the comparison knows, else what the capture pass saw; both where the first is a guess."""
    if not is_guess(origin):
        return origin.mechanism or examined.mechanism
    if examined.operator is not None:
        return examined.mechanism
    return "; ".join(filter(None, (examined.mechanism, origin.mechanism)))


def _with_numbers(origin: Origin, examined: Origin | None) -> Origin:
    if examined is None:
        return origin
    return replace(
        origin,
        max_ulp=examined.max_ulp,
        max_abs=examined.max_abs,
        value_equal=examined.value_equal if examined.value_equal is not None else origin.value_equal,
        numbers_reason=examined.numbers_reason,
        ulp_histogram=examined.ulp_histogram,
        operator=examined.operator,
        mechanism=_why(origin, examined),
        isolated=examined.isolated,
        healed=examined.healed,
    )
