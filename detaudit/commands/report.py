"""``detaudit report``: show the analysis stored in a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from detaudit.core.records import Report

FORMATS = ("terminal", "json", "markdown")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default="terminal",
    show_default=True,
    help="How to show it.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write to this file instead of the terminal.")
@click.option("--exit-code", is_flag=True, help="End with the verdict's exit code instead of 0.")
def command(trace: Path, format_: str, output: Path | None, exit_code: bool) -> int:
    """Show the analysis stored in TRACE, a file that `detaudit run` wrote.

    Ends with 0 when it could show the report; with --exit-code it ends as `detaudit run` did.

    \b
    Example:
      detaudit report moe.detaudit
      detaudit report moe.detaudit --format markdown --output report.md
    """
    from detaudit.commands.delivery import STDOUT, check, deliver
    from detaudit.reporters import reporter

    check(output, trace)
    report = _load(trace)
    deliver(lambda stream: reporter(format_).render(report, stream), output or STDOUT)
    return report.exit_code if exit_code else 0


def _load(path: Path) -> Report:
    from detaudit.trace import open_trace

    with open_trace(path) as trace:
        stored = trace.report()
        if stored is not None:
            report = Report.from_json(stored)
        else:
            from detaudit.compare import analyze

            click.echo(
                f"{path} holds no analysis (its audit did not finish); analysing what it recorded", err=True
            )
            report = analyze(trace)
    # A trace may have been moved since; the commands shown should name it as it was named here.
    return dataclasses.replace(report, trace=str(path))
