"""``detaudit compare``: the first module whose bits differ between two traces."""

from __future__ import annotations

from pathlib import Path

import click

from detaudit.commands.delivery import STDOUT, check, deliver, json_option, show


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--ulp", type=click.IntRange(0), help="Tolerate so many units in the last place of the final output."
)
@click.option(
    "--rel",
    type=click.FloatRange(0),
    help="Tolerate a relative error ||b - a|| / ||a|| of the final output.",
)
@json_option
def command(a: Path, b: Path, ulp: int | None, rel: float | None, json_file: Path | None) -> int:
    """Find the first module whose bits differ between trace A and trace B, with equal inputs.

    The traces come from `detaudit run`, on other machines, with other versions or other settings; what
    differs in their environments is shown beside the module.

    \b
    Ends with
      0  the same bits; or, with --ulp or --rel, a final output within the tolerance
      1  other bits, or beyond the tolerance
      3  inconclusive: the inputs differ, a trace varies in itself, or values were not kept

    \b
    Example:
      detaudit compare torch-2.12.detaudit torch-2.13.detaudit
      detaudit compare h100.detaudit h200.detaudit --rel 1e-3 --json comparison.json
    """
    from detaudit.core.comparison import Tolerance
    from detaudit.differ.traces import compare_traces
    from detaudit.reporters.comparison import ComparisonJsonReporter, ComparisonTerminalReporter
    from detaudit.trace import open_trace

    check(json_file, a, b)
    tolerance = None if ulp is None and rel is None else Tolerance(ulp, rel)
    with open_trace(a) as one, open_trace(b) as two:
        found = compare_traces(one, two, (str(a), str(b)), tolerance)
    show(lambda stream: ComparisonTerminalReporter().render(found, stream), aside=json_file == STDOUT)
    deliver(lambda stream: ComparisonJsonReporter().render(found, stream), json_file)
    return found.exit_code
