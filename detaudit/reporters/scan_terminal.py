"""A scan for a terminal: the counts, the suspects in a table, what could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from detaudit.core.scans import KernelScan, ScanReport
from detaudit.reporters.console import on_console
from detaudit.reporters.scan_wording import CAVEAT, Group, finalize_table, groups, summary_lines

MOST_LISTED = 40
_COLOUR = {
    "can accumulate in an unordered way": "red",
    "holds an atomic instruction that is not understood": "yellow",
    "takes tickets": "yellow",
}


def render_scan(
    report: ScanReport,
    stream: IO[str],
    *,
    everything: bool = False,
    new: Sequence[KernelScan] | None = None,
    width: int | None = None,
) -> None:
    """Write the scan.

    Args:
        everything: list kernels in which nothing was found too, and all rows.
        new: suspects that an earlier scan did not have, or None if there was none to compare with.
        width: columns; ``None`` takes the terminal's.
    """

    def show(console: Console) -> None:
        for line in summary_lines(report):
            console.print(Text(line, style="bold"))
        _finalize(console, report)
        _table(console, report, everything)
        _files(console, report)
        if new is not None:
            _new(console, new)
        console.print()
        console.print(Text(CAVEAT, style="dim"))

    on_console(stream, width, show)


def _table(console: Console, report: ScanReport, everything: bool) -> None:
    kernels = [
        kernel
        for kernel in report.kernels
        if everything or kernel.meaning != "no unordered accumulation found"
    ]
    rows = groups(kernels)
    shown = rows if everything else rows[:MOST_LISTED]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("kernel", overflow="fold", ratio=3)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    table.add_column("what", overflow="fold", ratio=2)
    for row in shown:
        table.add_row(row.short, f"{row.kernels:,}", row.arch, _what(row), style=_COLOUR.get(row.meaning, ""))
    console.print()
    console.print(table)
    if len(rows) > len(shown):
        console.print(Text(f"and {len(rows) - len(shown):,} more rows; --all lists them", style="dim"))


def _what(row: Group) -> Text:
    """What decides; barriers and counters only where nothing else is there to tell."""
    telling = [text for text in row.atomics if not text.startswith(("barrier", "counter", "flag"))]
    return Text("\n".join(telling or row.atomics or ("nothing",)))


def _finalize(console: Console, report: ScanReport) -> None:
    rows = finalize_table(report.kernels)
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("CUTLASS epilogue", no_wrap=True)
    table.add_column("kernels", justify="right")
    table.add_column("can accumulate in an unordered way", justify="right")
    for kind, kernels, suspects in rows:
        table.add_row(kind, f"{kernels:,}", f"{suspects:,}", style="red" if suspects else "")
    console.print()
    console.print(table)


def _files(console: Console, report: ScanReport) -> None:
    scanned = [file for file in report.files if file.functions]
    counts = (
        (len(scanned), "file"),
        (sum(file.images for file in scanned), "image"),
        (sum(file.functions for file in scanned), "function"),
    )
    told = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    console.print()
    console.print(Text(told, style="dim"))
    for tool in report.tools:
        console.print(Text(tool, style="dim"), soft_wrap=True)
    problems = [file for file in report.files if file.problem]
    for file in problems[:MOST_LISTED]:
        console.print(Text(f"{file.path}: {file.problem}", style="yellow"))
    if len(problems) > MOST_LISTED:
        console.print(Text(f"and {len(problems) - MOST_LISTED:,} more files not read whole", style="yellow"))


def _new(console: Console, new: Sequence[KernelScan]) -> None:
    console.print()
    if not new:
        console.print(Text("no new suspects", style="bold green"))
        return
    console.print(Text(f"{len(new):,} new {'suspect' if len(new) == 1 else 'suspects'}", style="bold red"))
    for row in groups(new)[:MOST_LISTED]:
        console.print(Text(f"  {row.short} ({row.arch}, {row.kernels:,})"))
