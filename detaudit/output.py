"""The target's own prints, kept apart from the report: in a file beside the trace, if there are any."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from detaudit.trace import captures_dir


class TargetOutput(io.TextIOBase):
    """Takes what the target prints. Nothing printed, no file."""

    def __init__(self, trace: Path) -> None:
        self.path = captures_dir(trace) / "output.txt"
        self._file: TextIO | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        return self._file.write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """What Python code prints to standard output inside goes to the file."""
        with contextlib.redirect_stdout(self):
            try:
                yield
            finally:
                if self._file is not None:
                    self._file.close()
                    self._file = None
