"""A scan as SARIF 2.1.0 (OASIS), which code hosts show beside the code that a change touches.

Suspects are warnings, ticket takers notes; kernels in which nothing was found make no result. There are no
lines to point at, so a result is located by its file and by the kernel's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from detaudit import __version__
from detaudit.core.scans import KernelScan, Meaning, ScanReport
from detaudit.reporters.json import write_json
from detaudit.reporters.scan_wording import CAVEAT, EXPLAINED, atomics_text

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES: Mapping[Meaning, tuple[str, str, str]] = {
    "can accumulate in an unordered way": ("unordered-accumulation", "UnorderedAccumulation", "warning"),
    "holds an atomic instruction that is not understood": ("unknown-atomic", "UnknownAtomic", "warning"),
    "takes tickets": ("takes-tickets", "TakesTickets", "note"),
}
"""Rule id, name and level of each meaning that is worth a result."""


def render_sarif(report: ScanReport, stream: IO[str]) -> None:
    write_json(to_sarif(report), stream)


def to_sarif(report: ScanReport) -> dict[str, Any]:
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "columnKind": "utf16CodeUnits",
                "artifacts": [{"location": {"uri": _uri(file.path)}} for file in report.files],
                "invocations": [_invocation(report)],
                "results": [_result(kernel) for kernel in report.kernels if kernel.meaning in RULES],
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "detaudit scan",
        "semanticVersion": __version__,
        "rules": [
            {
                "id": identifier,
                "name": name,
                "shortDescription": {"text": f"A kernel {meaning}."},
                "fullDescription": {"text": EXPLAINED[meaning]},
                "help": {"text": CAVEAT},
                "defaultConfiguration": {"level": level},
            }
            for meaning, (identifier, name, level) in RULES.items()
        ],
    }


def _invocation(report: ScanReport) -> dict[str, Any]:
    problems = [file for file in report.files if file.problem]
    return {
        "executionSuccessful": True,
        "toolExecutionNotifications": [
            {"level": "warning", "message": {"text": f"{file.path}: {file.problem}"}} for file in problems
        ],
    }


def _result(kernel: KernelScan) -> dict[str, Any]:
    identifier, _, level = RULES[kernel.meaning]
    what = "; ".join(atomics_text(kernel, ("accumulation", "unknown", "ticket")))
    epilogue = f", epilogue {kernel.finalize}" if kernel.finalize else ""
    return {
        "ruleId": identifier,
        "ruleIndex": list(RULES).index(kernel.meaning),
        "level": level,
        "message": {"text": f"{kernel.short} ({kernel.arch}{epilogue}) {kernel.meaning}: {what}."},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _uri(kernel.file)}},
                "logicalLocations": [
                    {
                        "name": kernel.short,
                        "fullyQualifiedName": f"{kernel.arch}/{kernel.short}",
                        "decoratedName": kernel.name,
                        "kind": "function",
                    }
                ],
            }
        ],
        "partialFingerprints": {"kernel/v1": _fingerprint(kernel)},
    }


def _fingerprint(kernel: KernelScan) -> str:
    """The same in every version of a library that still has the kernel with the same accumulations."""
    what = "|".join((kernel.arch, kernel.name, *atomics_text(kernel, ("accumulation", "unknown", "ticket"))))
    return hashlib.sha256(what.encode("utf-8", "replace")).hexdigest()[:32]


def _uri(path: str) -> str:
    return Path(path).as_uri() if Path(path).is_absolute() else quote(Path(path).as_posix())
