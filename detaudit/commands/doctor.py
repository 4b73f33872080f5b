"""``detaudit doctor``: what this machine can audit, and what changes its numerics."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from detaudit.commands.delivery import STDOUT, deliver, json_option, show
from detaudit.reporters.json import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from detaudit.doctor import Check, Diagnosis, KernelCheck

TOPICS = {"machine": "This machine", "flashinfer": "FlashInfer", "numerics": "Numerics", "engines": "Engines"}
COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


@click.command()
@json_option
def command(json_file: Path | None) -> None:
    """Show what this machine can audit: its GPU, versions, which kernels would run here and which not,
    settings that change numerics, and combinations known to mislead.

    Every line is ok, a note, or a problem. Ends with 0 whatever it finds.

    \b
    Example:
      detaudit doctor
      detaudit doctor --json -
    """
    from detaudit.doctor import diagnose
    from detaudit.machine import probe

    diagnosis = diagnose(probe())
    show(lambda stream: render(diagnosis, stream), aside=json_file == STDOUT)
    deliver(lambda stream: write_json(_body(diagnosis), stream), json_file)


def render(diagnosis: Diagnosis, stream: IO[str], width: int | None = None) -> None:
    """The diagnosis as text, grouped by topic; ``width`` as in the terminal reporter."""
    from detaudit.reporters.console import on_console

    def show(console: Console) -> None:
        for topic, title in TOPICS.items():
            rows = [_check_row(check) for check in diagnosis.checks if check.topic == topic]
            _section(console, title, rows)
        for sm in dict.fromkeys(kernel.sm for kernel in diagnosis.kernels):
            title = "Kernels of FlashInfer" + ("" if sm is None else f" on SM{sm}")
            _section(console, title, [_kernel_row(kernel) for kernel in diagnosis.kernels if kernel.sm == sm])
        console.print("The reference kernels (detaudit kernels --backend reference) run everywhere.")

    on_console(stream, width, show)


def _check_row(check: Check) -> tuple[str, str, str]:
    return check.level, COLOURS[check.level], check.text + (f". Fix: {check.fix}" if check.fix else "")


def _kernel_row(kernel: KernelCheck) -> tuple[str, str, str]:
    return (
        "runs" if kernel.runs else "no",
        "green" if kernel.runs else "dim",
        f"{kernel.kernel}: {kernel.text}",
    )


def _section(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    """Rows of (word, its style, text)."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=len("problem"))
    table.add_column(overflow="fold")
    for word, style, text in rows:
        table.add_row(Text(word, style=style), text)
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def _body(diagnosis: Diagnosis) -> dict[str, Any]:
    """With the environment that reports hold too, so that both can be compared."""
    body: dict[str, Any] = diagnosis.to_json()
    if diagnosis.machine.torch_error is None and importlib.util.find_spec("detaudit.environment"):
        body["environment"] = importlib.import_module("detaudit.environment").environment()
    return body
