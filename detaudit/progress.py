"""What a long piece of work reports to; detaudit.reporters.progress shows it on a terminal."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def advance(self, steps: int = 1) -> None:
        """``steps`` more are done."""
        ...

    def describe(self, description: str) -> None:
        """Say what is going on now."""
        ...


class Silent:
    """Progress that nobody sees."""

    def advance(self, steps: int = 1) -> None:
        pass

    def describe(self, description: str) -> None:
        pass
