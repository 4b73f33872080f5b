"""A comparison of two traces: outcome, the first call that differs, the environments beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from detaudit.core.comparison import SiteDifference, TraceComparison
from detaudit.reporters.console import on_console
from detaudit.reporters.json import write_json
from detaudit.reporters.wording import joined, row_ranges, size_of

_COLOUR = {
    "equal": "bold green",
    "within tolerance": "bold yellow",
    "different": "bold red",
    "inconclusive": "bold yellow",
}
MOST_SITES = 8


class ComparisonTerminalReporter:
    """Args: width: columns; ``None`` takes the terminal's, or 100 where there is none."""

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def render(self, comparison: TraceComparison, stream: IO[str]) -> None:
        on_console(stream, self.width, lambda console: _print(console, comparison))


class ComparisonJsonReporter:
    """``TraceComparison.to_json``, indented."""

    def render(self, comparison: TraceComparison, stream: IO[str]) -> None:
        write_json(comparison.to_json(), stream)


def _print(console: Console, found: TraceComparison) -> None:
    headline = Text(found.outcome, style=_COLOUR[found.outcome])
    console.print(headline.append(f"  (exit code {found.exit_code})", style="not bold default"))
    console.print(Text(found.reason))
    sides = [f"A: {found.a}  {found.targets[0]}", f"B: {found.b}  {found.targets[1]}"]
    _section(console, "", [*sides, f"{found.calls:,} calls had the same arguments in both"])
    if found.change is not None:
        _section(console, "First difference", [str(found.change), *_sites(found.sites)])
    _section(console, "Final output", _sites(found.final))
    _section(console, "Parameters that differ", [joined(found.parameters)] if found.parameters else [])
    _section(console, "Environment", [str(change) for change in found.environment])
    if found.varying:
        names = joined(path or "(root)" for path in found.varying)
        _section(console, "Vary within a trace, so nothing was shown about them", [names])
    _section(console, "Notes", list(found.notes))


def _section(console: Console, title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if not lines:
        return
    console.print()
    if title:
        console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2 if title else 0)))


def _sites(sites: tuple[SiteDifference, ...]) -> list[str]:
    lines = [_site(site) for site in sites[:MOST_SITES]]
    return [*lines, f"and {len(sites) - MOST_SITES} more"] if len(sites) > MOST_SITES else lines


def _site(site: SiteDifference) -> str:
    kind = site.a if site.a == site.b else f"{site.a or 'absent'} -> {site.b or 'absent'}"
    facts = [f"{site.site} {kind}"]
    if site.rows is not None and site.rows_total is not None and site.rows_total > 1:
        facts.append(f"rows {row_ranges(site.rows)} of {site.rows_total:,}")
    size = size_of(site.max_ulp, site.max_abs)
    if size:
        facts.append(size)
    if site.rel_error is not None:
        facts.append(f"relative error {site.rel_error:.2g}")
    if site.reason:
        facts.append(site.reason)
    return ", ".join(facts)
