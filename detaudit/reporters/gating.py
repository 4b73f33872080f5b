"""Reporters of the gate turn a ``GateResult`` into text; they read nothing else, and never import torch."""

from __future__ import annotations

from typing import IO, Protocol

from detaudit.core.gating import GateResult
from detaudit.reporters.json import write_json

FORMATS = ("json", "junit", "sarif", "markdown")


class GateReporter(Protocol):
    """One way of showing a gate's result."""

    def render(self, result: GateResult, stream: IO[str]) -> None: ...


class GateJsonReporter:
    """``GateResult.to_json``, indented."""

    def render(self, result: GateResult, stream: IO[str]) -> None:
        write_json(result.to_json(), stream)


def gate_reporter(format_: str) -> GateReporter:
    """The reporter for one of ``FORMATS``, ``terminal`` or ``github``."""
    from detaudit.reporters.gate import GateMarkdownReporter, GateTerminalReporter
    from detaudit.reporters.github import GitHubReporter
    from detaudit.reporters.junit import JUnitReporter
    from detaudit.reporters.sarif import SarifReporter

    reporters: dict[str, type[GateReporter]] = {
        "json": GateJsonReporter,
        "junit": JUnitReporter,
        "sarif": SarifReporter,
        "markdown": GateMarkdownReporter,
        "terminal": GateTerminalReporter,
        "github": GitHubReporter,
    }
    return reporters[format_]()
