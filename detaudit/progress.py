"""What a long piece of work reports to; detaudit.reporters.progress shows it on a terminal."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def begin(self, description: str, total: int | None) -> None:
        """A new piece of work of ``total`` steps; ``None`` is an unknown number."""
        ...

    def advance(self, steps: int = 1) -> None:
        """``steps`` more are done."""
        ...

    def describe(self, description: str) -> None:
        """Say what is going on now."""
        ...


class Silent:
    """Progress that nobody sees."""

    def begin(self, description: str, total: int | None) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass

    def describe(self, description: str) -> None:
        pass


class Counted:
    """What a kernel runner reports to (what is running, runs done, runs there will be), shown as progress."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._total = -1
        self._done = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if total != self._total or done < self._done:
            self.progress.begin(what, total or None)
            self._total, self._done = total, 0
        self.progress.describe(what)
        self.progress.advance(done - self._done)
        self._done = done
