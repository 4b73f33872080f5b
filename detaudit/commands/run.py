"""``detaudit run``: record, locate, confirm, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from detaudit.commands.delivery import STDOUT, check, deliver, json_option, reserved, show
from detaudit.core.errors import UsageError
from detaudit.core.options import DEFAULT_CAPTURE_BYTES

if TYPE_CHECKING:
    from detaudit.core.options import Options

EXAMPLES = """\b
Examples:
  detaudit run model.py
  detaudit run model.py:build_small --runs 50 --json report.json
  detaudit run train.py --script --runs 5 -- --steps 3
"""


@click.command(epilog=EXAMPLES)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--runs", default=20, show_default=True, type=click.IntRange(1), help="Recorded runs.")
@click.option(
    "--script", is_flag=True, help="Execute the file as __main__, in a fresh process for every run."
)
@click.option("--only", multiple=True, metavar="GLOB", help="Record only modules whose path matches.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Do not record modules whose path matches.")
@click.option("--no-history", is_flag=True, help="No repetition in two fresh processes when runs differ.")
@click.option("--no-observer", is_flag=True, help="No unrecorded runs for comparison.")
@click.option("--no-confirm", is_flag=True, help="Do not rerun the kernels at fault alone.")
@click.option(
    "--kernel-runs",
    default=300,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each kernel variant.",
)
@click.option(
    "--capture-bytes",
    default=DEFAULT_CAPTURE_BYTES,
    show_default=f"{DEFAULT_CAPTURE_BYTES >> 30} GiB",
    type=click.IntRange(0),
    help="Most bytes of tensors to keep when origins are captured.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The trace to write; by default TARGET-TIME.detaudit in this folder. Never overwritten.",
)
@json_option
def command(
    target: str,
    args: tuple[str, ...],
    script: bool,
    output: Path | None,
    json_file: Path | None,
    **settings: object,
) -> int:
    """Run TARGET repeatedly on identical inputs and state, and find the module that is the first to differ.

    TARGET is FILE.py or FILE.py:FACTORY: a file with build_model() and make_inputs(), or a script. What comes
    after -- are the target's own arguments.

    Exit code: 0 no difference, 1 nondeterministic, 2 the audit could not be made, 3 inconclusive.
    """
    from detaudit.auditing import audit, default_trace
    from detaudit.reporters import reporter
    from detaudit.reporters.progress import progress
    from detaudit.target import resolve

    spec = resolve(target, script=script, argv=args)
    options = _options(settings)
    trace = output or default_trace(spec)
    check(json_file, spec.path, trace)
    if trace == STDOUT:
        raise UsageError("a trace is a file of its own; give --output a name")
    with reserved(json_file), progress(None, "starting") as shown:
        # The commands shown should name the target and the trace as they were named here.
        report = dataclasses.replace(audit(spec, options, trace, shown), target=target, trace=str(trace))
    show(lambda stream: reporter("terminal").render(report, stream), aside=json_file == STDOUT)
    deliver(lambda stream: reporter("json").render(report, stream), json_file)
    return report.exit_code


def _options(settings: dict[str, object]) -> Options:
    from detaudit.core.options import Options

    flags = {name: not settings.pop(f"no_{name}") for name in ("history", "observer", "confirm")}
    return Options(**flags, **settings)  # type: ignore[arg-type]
