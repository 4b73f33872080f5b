"""Rich, tamed: a fixed width and plain text where there is no terminal, and no exit of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from rich.console import Console

PLAIN_WIDTH = 100


def on_console(stream: IO[str], width: int | None, show: Callable[[Console], None]) -> None:
    """Let ``show`` print, then write the text to ``stream`` at once.

    Args:
        width: columns; ``None`` takes the terminal's, or ``PLAIN_WIDTH`` where there is none.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if width is not None:
        console.width = width
    elif not console.is_terminal:
        console.width = PLAIN_WIDTH
    # Captured and written by us: rich would end the process with 1 on a closed pipe.
    with console.capture() as capture:
        show(console)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    stream.write(text.lstrip("\n") + "\n")
