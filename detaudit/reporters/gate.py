"""The gate's result for a terminal and as Markdown: a line per check, notes below."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from detaudit.core.gating import Check, GateResult, TargetResult
from detaudit.reporters.console import on_console
from detaudit.reporters.markdown import cell, code, table

_COLOUR = {"passed": "bold green", "failed": "bold red", "error": "bold red", "inconclusive": "bold yellow"}
_SIGN = {"passed": "✅", "failed": "❌", "error": "❌", "inconclusive": "⚠️"}


class GateTerminalReporter:
    """Args: width: columns; ``None`` takes the terminal's, or 100 where there is none."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def render(self, result: GateResult, stream: IO[str]) -> None:
        on_console(stream, self.width, lambda console: _print(console, result))


class GateMarkdownReporter:
    """For a step summary or a comment: one table, then notes by target."""

    def render(self, result: GateResult, stream: IO[str]) -> None:
        status = f"{_SIGN[result.status]} detaudit gate {result.status}"
        lines = [f"## {status} (exit code {result.exit_code})", ""]
        rows = [
            [code(target.name), check.name, f"{_SIGN[check.status]} {check.status}", cell(check.message)]
            for target in result.targets
            for check in target.checks
        ]
        lines += table(["target", "check", "result", "what was shown"], rows)
        notes = [f"- {code(target.name)}: {cell(note)}" for target in result.targets for note in target.notes]
        notes += [f"- {cell(note)}" for note in result.notes]
        stream.write("\n".join([*lines, *(["", *notes] if notes else [])]) + "\n")


def _print(console: Console, result: GateResult) -> None:
    for target in result.targets:
        _target(console, target)
    for note in result.notes:
        console.print(Text(note))
    headline = Text("gate ").append(result.status, style=_COLOUR[result.status])
    console.print(headline.append(f"  (exit code {result.exit_code})"))


def _target(console: Console, target: TargetResult) -> None:
    headline = Text(target.name, style="bold").append("  ")
    headline.append(target.status, style=_COLOUR[target.status])
    if target.seconds:
        headline.append(f"  {target.seconds:.1f} s", style="dim")
    console.print(headline)
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in target.checks:
        grid.add_row(*_row(check))
    for note in target.notes:
        grid.add_row(Text("note", style="dim"), "", Text(note, style="dim"))
    if target.trace:
        grid.add_row(Text("trace", style="dim"), "", Text(target.trace, style="dim"))
    console.print(Padding(grid, (0, 0, 1, 2)))


def _row(check: Check) -> tuple[Text, Text, Text]:
    return Text(check.name), Text(check.status, style=_COLOUR[check.status]), Text(check.message)
