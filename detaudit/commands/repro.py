"""``detaudit repro``: a folder that reproduces a finding without detaudit."""

from __future__ import annotations

from pathlib import Path

import click

DEFAULT_SECONDS = 120.0


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--origin", metavar="MODULE", help="Module path of the origin; by default the first that was captured."
)
@click.option("--minimize", is_flag=True, help="Make the call as small as it can be while it still differs.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=DEFAULT_SECONDS,
    show_default=True,
    help="Most time to spend on --minimize.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The folder to write; by default TRACE-repro in this folder. Never overwritten.",
)
def command(trace: Path, origin: str | None, minimize: bool, seconds: float, output: Path | None) -> int:
    """Write a folder that reproduces an origin of TRACE without detaudit: the captured arguments of one call,
    a script that repeats it, and a bug report.

    The script is run before it is written; nothing is written unless it shows the difference. It exits with 1
    where the bits differ, 0 where they do not, 3 where they could not, 2 where it cannot be run.

    \b
    Examples:
      detaudit repro moe.detaudit
      detaudit repro moe.detaudit --origin layers.0.mlp.experts --minimize --output moe-bug
    """
    from detaudit.reporters.progress import progress
    from detaudit.repro.choose import findings

    found = findings(trace, origin)
    folder = output or Path(f"{trace.stem}-repro")

    # These import torch, which a trace without a captured call need not wait for.
    from detaudit.repro.folder import write_repro

    with progress(None, "starting") as shown:
        written = write_repro(
            found, folder, minimize_seconds=seconds if minimize else None, say=shown.describe
        )
    kind = written.finding.kind
    click.echo(f"{written.finding.module} differs alone, too:")
    click.echo(f"  {written.trial.last_line}")
    if minimize:
        click.echo(f"Minimized from {written.elements_before:,} to {written.elements:,} elements")
    click.echo(f"Wrote {folder}: repro.py, its inputs, environment.json, REPORT.md")
    click.echo(f"  cd {folder} && python repro.py            # exits 1")
    click.echo(f"  cd {folder} && python repro.py {kind.switch}    # {kind.avoid}")
    return 0
