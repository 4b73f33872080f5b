"""Progress of a long piece of work: on stderr, only on a terminal, only after a second.

No thread of ours runs beside the work (a one-shot timer aside), because the work is usually a target whose
timing is the subject: the bar moves when ``advance`` or ``describe`` is called.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from detaudit.progress import Progress, Silent

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

DELAY_SECONDS = 1.0


@contextmanager
def progress(total: int | None, description: str) -> Iterator[Progress]:
    """Show ``total`` steps of ``description`` with the time that remains; ``None`` is an unknown number.

    While the bar is shown, what the work prints on a terminal appears above it. Only for use on one thread.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield Silent()
        return
    bar = _Bar(total, description)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    """Rich's display, blank for the first second, and never a reason for the work to fail.

    It is started at once, since it takes over sys.stdout: doing that from the timer, in the middle of the
    work, could catch a redirection of the work's own and put that back in the end.
    """

    def __init__(self, total: int | None, description: str) -> None:
        self._rich = _display()
        self._task = self._rich.add_task(description, total=total)
        self._guarded(self._rich.start)
        self._timer = threading.Timer(DELAY_SECONDS, self._guarded, args=[self._rich.refresh])
        self._timer.daemon = True
        self._timer.start()

    def begin(self, description: str, total: int | None) -> None:
        # Not reset(): a task once given a total cannot be made one of unknown length.
        self._rich.remove_task(self._task)
        self._task = self._rich.add_task(description, total=total)
        self._guarded(self._rich.refresh)

    def advance(self, steps: int = 1) -> None:
        self._guarded(lambda: self._rich.update(self._task, advance=steps, refresh=True))

    def describe(self, description: str) -> None:
        self._guarded(lambda: self._rich.update(self._task, description=description, refresh=True))

    def close(self) -> None:
        self._timer.cancel()
        self._timer.join()
        self._guarded(self._rich.stop)

    @staticmethod
    def _guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except OSError:
            pass  # a terminal that went away is no reason to lose an audit


def _display() -> RichProgress:
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends the process with 1
            self.quiet = True

    class Delayed(RichProgress):
        started = time.monotonic()

        def get_renderables(self) -> Iterable[RenderableType]:
            if time.monotonic() - self.started >= DELAY_SECONDS:
                yield from super().get_renderables()

    return Delayed(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=QuietConsole(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        redirect_stderr=True,
    )
