"""Where what a command shows goes: to the terminal, to a file, or, where the file is ``-``, to a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import click

from detaudit.core.errors import UsageError

STDOUT = Path("-")

Render = Callable[[IO[str]], None]

json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Also write it as JSON; - is standard output, and the rest goes to standard error.",
)


def check(path: Path | None, *others: Path | None) -> None:
    """Find out before long work that a file cannot be written, or should not be.

    Args:
        others: what the command reads or writes besides.

    Raises:
        TraceNotWritten: it cannot be written, as far as that shows.
        UsageError: it is one of the others.
    """
    if path is None:
        return
    if path == STDOUT:
        if STDOUT in others:
            raise UsageError("only one output can be - (standard output); give the others files")
        return
    from detaudit.core.files import check_writable

    check_writable(path)
    for other in others:
        if other is not None and _same(path, other):
            raise UsageError(f"{path} would be written over: it is read or written for something else too")


def _same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(path) == os.path.realpath(other)


@contextlib.contextmanager
def reserved(path: Path | None) -> Iterator[None]:
    """Inside, standard output is standard error for everybody, C code and other processes too, if ``path``
    is ``-``: it belongs to what is delivered afterwards."""
    try:
        descriptor = sys.stdout.fileno() if path == STDOUT else None
    except (AttributeError, OSError, ValueError):  # none, or none of the operating system's
        descriptor = None
    if descriptor is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(descriptor)
    os.dup2(2, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, descriptor)
        os.close(kept)


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
