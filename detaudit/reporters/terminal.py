"""The report for a terminal, through rich; plain text of a fixed width when it goes elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from detaudit.core.records import KernelReport, Report, VariantResult
from detaudit.reporters import evidence, wording
from detaudit.reporters.console import PLAIN_WIDTH, on_console
from detaudit.reporters.tree import Line, module_tree

MOST_LISTED = 10
_COLOUR = {"deterministic": "bold green", "nondeterministic": "bold red", "inconclusive": "bold yellow"}
_OUTCOME_COLOUR = {"confirmed": "bold green"}


class TerminalReporter:
    """Headline, origins, tree, findings, kernels, controls, and what to type next.

    Args:
        width: columns; ``None`` takes the terminal's, or 100 where there is none.
    """

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def render(self, report: Report, stream: IO[str]) -> None:
        on_console(stream, self.width, lambda console: _print(console, report))


def render_kernels(kernels: Iterable[KernelReport], stream: IO[str], width: int | None = None) -> None:
    """Kernel reports alone, as ``detaudit kernels`` shows them; ``width`` as in ``TerminalReporter``."""

    def show(console: Console) -> None:
        for kernel in kernels:
            _kernel(console, kernel)

    on_console(stream, width, show)


def _print(console: Console, report: Report) -> None:
    _headline(console, report)
    _origins(console, report)
    _findings(console, report)
    for kernel in report.kernels:
        _kernel(console, kernel)
    _controls(console, report)
    console.print()
    console.print(Text("Next", style="bold"))
    for command in wording.next_commands(report):
        # Never wrapped: it is there to be copied.
        console.print(Text(f"  {command}", style="bold"), soft_wrap=True)


def _section(console: Console, title: str, lines: list[RenderableType]) -> None:
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Padding(line, (0, 0, 0, 2)))


def _headline(console: Console, report: Report) -> None:
    headline = Text(report.verdict, style=_COLOUR[report.verdict])
    headline.append(f"  (exit code {report.exit_code})", style="not bold default")
    console.print(headline)
    console.print(wording.rate_line(report))
    if report.rate.comparisons:
        console.print(wording.outputs_line(report))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    named = [
        ("target", report.target),
        ("conditions", wording.conditions_line(report)),
        ("trace", report.trace),
    ]
    for name, value in named:
        if value:
            facts.add_row(name, value)
    console.print()
    console.print(facts)


def _origins(console: Console, report: Report) -> None:
    lines: list[RenderableType] = []
    for origin in report.origins:
        lines.append(Text(wording.origin_line(origin, report), style="red"))
        lines += [Padding(Text(detail), (0, 0, 0, 2)) for detail in wording.origin_details(origin)]
    _section(
        console, "Where it starts" if len(report.origins) < 2 else "Where it starts, independently", lines
    )
    tree = _tree(module_tree(report))
    if tree is not None:
        _section(console, "Modules", [tree])


def _tree(lines: list[Line]) -> Tree | None:
    """Rich's tree from lines in depth-first order."""
    if not lines:
        return None
    root = Tree(_tree_label(lines[0]), guide_style="dim")
    branches = [root]
    for line in lines[1:]:
        del branches[line.depth :]
        branches.append(branches[-1].add(_tree_label(line)))
    return root


def _tree_label(line: Line) -> Text:
    label = Text(line.label or wording.ROOT, style="bold red" if line.origin else "")
    if line.cls:
        label.append(f" ({line.cls})", style="not bold default" if line.origin else "dim")
    if line.hidden:
        noun = "module" if line.path is None else "module below"
        more = "" if line.hidden == 1 else "s"
        label.append(f"  {line.hidden:,} {noun.replace('module', 'module' + more)}", style="dim")
    if line.origin:
        label.append("  <- origin", style="bold red")
    return label


def _findings(console: Console, report: Report) -> None:
    lines: list[RenderableType] = []
    for finding in report.findings:
        where = "" if finding.module is None else f" in {wording.module_name(finding.module)}"
        lines.append(Text.assemble((finding.kind, "bold yellow"), f"{where}: {finding.message}"))
        lines.append(Padding(Text(f"see {finding.docs}", style="dim"), (0, 0, 0, 2)))
    _section(console, "Findings", lines)


def _kernel(console: Console, kernel: KernelReport) -> None:
    where = "" if kernel.module is None else f" in {wording.module_name(kernel.module)}"
    outcome = Text.assemble((kernel.outcome, _OUTCOME_COLOUR.get(kernel.outcome, "bold yellow")))
    outcome.append(f": {kernel.outcome_reason}", style="not bold default")
    lines: list[RenderableType] = [outcome]
    if reach := wording.reach(kernel):
        lines.append(f"this is {reach}")
    if kernel.control:
        lines.append(f"positive control: {kernel.control}")
    if kernel.variants:
        lines += _variants(kernel.variants, console.width)
    lines += [f"{v.name}: not run, {v.reason}" for v in kernel.variants if not v.runs and v.reason]
    if kernel.recommended:
        lines.append(Text(f"to make it stable, use {wording.recommended_setting(kernel)}", style="bold"))
        settings = wording.recommendation(kernel)
        settings += [("warning", warning) for warning in wording.recommendation_warnings(kernel)]
        lines += [Padding(Text(f"{name}: {value}"), (0, 0, 0, 2)) for name, value in settings]
    _section(console, f"Kernel {kernel.case}{where}, backend {kernel.backend}", lines)


def _variants(variants: tuple[VariantResult, ...], width: int) -> list[RenderableType]:
    """The table; where it is too wide, settings are listed below and the less telling numbers left out."""
    wide, narrow = width >= PLAIN_WIDTH, width < 80
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("variant", "settings", "tactic") if wide else ("variant", "tactic"):
        table.add_column(title, overflow="fold")
    numbers = ("differ", "bound", "ULP", "rel. err", "median ms", "ratio")
    kept = [index for index, title in enumerate(numbers) if not narrow or title not in ("ULP", "rel. err")]
    for index in kept:
        table.add_column(numbers[index], justify="right", no_wrap=True)
    for variant in variants:
        style = "red" if variant.runs_differing else ("" if variant.runs else "dim")
        (name, settings, tactic), cells = wording.variant_cells(variant)
        head = (name, settings.replace(", ", "\n"), tactic) if wide else (name, tactic)
        table.add_row(*head, *(cells[index] for index in kept), style=style)
    listed: list[RenderableType] = (
        [] if wide else [f"{v.name}: {wording.settings(v.settings)}" for v in variants]
    )
    return ["", table, "", *listed]


def _controls(console: Console, report: Report) -> None:
    _section(console, "Observer control", [*map(Text, evidence.observer_lines(report.observer))])
    done, missing = evidence.restored(report)
    lines: list[RenderableType] = [Text(item) for item in done]
    lines += [Text(f"not put back: {item}", style="yellow") for item in missing]
    _section(console, "Put back before each run", lines)
    _section(console, "Observed", [*map(Text, evidence.coverage_lines(report))])
    unseen = evidence.unobserved(report.coverage)
    shown: list[RenderableType] = [Text(item) for item in unseen[:MOST_LISTED]]
    if len(unseen) > MOST_LISTED:
        shown.append(Text(f"and {len(unseen) - MOST_LISTED:,} more; --format json lists all"))
    _section(console, "Not observed", shown)
