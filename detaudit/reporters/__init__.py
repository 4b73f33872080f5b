"""Reporters turn a ``Report`` into text; they read nothing else, and never import torch."""

from __future__ import annotations

from typing import IO, Protocol

from detaudit.core.records import Report


class Reporter(Protocol):
    """One way of showing a report."""

    def render(self, report: Report, stream: IO[str]) -> None:
        """Write ``report`` to ``stream``; nothing is written if it cannot be shown."""
        ...


def reporter(format_: str) -> Reporter:
    """The reporter for ``terminal``, ``json`` or ``markdown``."""
    if format_ == "terminal":
        from detaudit.reporters.terminal import TerminalReporter

        return TerminalReporter()
    if format_ == "json":
        from detaudit.reporters.json import JsonReporter

        return JsonReporter()
    if format_ == "markdown":
        from detaudit.reporters.markdown import MarkdownReporter

        return MarkdownReporter()
    raise ValueError(f"no reporter for format {format_!r}")
