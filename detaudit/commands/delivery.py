"""Where what a command shows goes: to the terminal, to a file, or, where the file is ``-``, to a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import click

STDOUT = Path("-")

Render = Callable[[IO[str]], None]


def check(path: Path | None) -> None:
    """Find out before long work that a file cannot be written; see ``check_writable``.

    Raises:
        TraceNotWritten: as far as that shows.
    """
    if path is not None and path != STDOUT:
        from detaudit.core.files import check_writable

        check_writable(path)


def show(render: Render, *, aside: bool = False) -> None:
    """Render for people: to standard output, or ``aside`` to standard error, where JSON has the other."""
    render((sys.stderr if aside else sys.stdout) or io.StringIO())


def deliver(render: Render, path: Path | None) -> None:
    """Render to a file, written whole or not at all, and say so; ``-`` is standard output, None is nowhere.

    Raises:
        TraceNotWritten: the file cannot be written.
    """
    if path is None:
        return
    if path == STDOUT:
        show(render)
        return
    from detaudit.core.files import write_text

    text = io.StringIO()
    render(text)
    write_text(path, text.getvalue())
    click.echo(f"Wrote {path}", err=True)
