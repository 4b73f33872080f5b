"""Which captured call an origin can be reproduced from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from detaudit.core.errors import NoCase, Unsupported, UsageError
from detaudit.core.records import KernelReport, Origin, Report
from detaudit.repro.script import Kind, kind_of
from detaudit.trace import captures_dir, open_trace

ROOT = "(root)"


@dataclass(frozen=True, slots=True)
class Finding:
    """An origin of a trace, and a captured call in it: ``folder`` is a saved case, ``kernel`` its report."""

    trace: Path
    report: Report
    origin: Origin
    folder: Path
    entry: str
    kind: Kind
    kernel: KernelReport | None

    @property
    def module(self) -> str:
        return self.origin.module or ROOT


def findings(trace: Path, origin: str | None) -> list[Finding]:
    """The captured calls of an origin, kernels before operators; of the first origin that has any by default.

    Raises:
        NoCase: the trace has nothing to reproduce.
        UsageError: ``origin`` names none of its origins.
        TraceUnreadable, TraceVersion: the trace cannot be read.
    """
    with open_trace(trace) as opened:
        stored, not_captured = opened.report(), opened.meta.get("not_captured")
        script = opened.meta.get("mode") == "script"
    if stored is None:
        raise NoCase(f"{trace} holds no analysis, since its audit did not finish; run 'detaudit run' again")
    report = Report.from_json(stored)
    origins = _asked(report, trace, origin)
    for candidate in origins:
        if found := list(_of(candidate, report, trace)):
            return found
    reasons = not_captured if isinstance(not_captured, dict) else {}
    names = ", ".join(candidate.module or ROOT for candidate in origins)
    reason = next((reasons[o.module] for o in origins if o.module in reasons), None)
    raise NoCase(
        f"{trace} holds no captured call of {names}"
        + (
            f" ({reason})"
            if reason
            else "; calls of a script are not captured: give 'detaudit run' build_model() and make_inputs()"
            if script
            else "; 'detaudit run' captures one where an operator or a known kernel differs"
        )
    )


def _asked(report: Report, trace: Path, origin: str | None) -> list[Origin]:
    if not report.origins:
        raise NoCase(f"{trace} has no origin to reproduce: its verdict is {report.verdict}")
    if origin is None:
        return list(report.origins)
    wanted = [item for item in report.origins if (item.module or ROOT) == (origin or ROOT)]
    if not wanted:
        known = ", ".join(item.module or ROOT for item in report.origins)
        raise UsageError(f"{origin!r} is no origin in {trace}; choose one of: {known}")
    return wanted


def _of(origin: Origin, report: Report, trace: Path) -> Iterator[Finding]:
    folders = captures_dir(trace)
    for folder in [*sorted(folders.glob("case-*")), *sorted(folders.glob("operator-*"))]:
        described = _description(folder)
        if described is None or not _lies_in(described.get("module"), described.get("call"), origin):
            continue
        try:
            kind = kind_of(str(described["entry"]))
        except Unsupported:
            continue
        kernel = next((item for item in report.kernels if item.case == described.get("name")), None)
        yield Finding(trace, report, origin, folder, str(described["entry"]), kind, kernel)


def _description(folder: Path) -> dict[str, object] | None:
    """``case.json`` without its tensors; ``None`` where it cannot be read."""
    try:
        body = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) and "entry" in body else None


def _lies_in(module: object, call: object, origin: Origin) -> bool:
    if module == origin.module:
        return call == origin.call
    return isinstance(module, str) and (not origin.module or module.startswith(f"{origin.module}."))
