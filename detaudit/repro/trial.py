"""Running a repro script as a user would, and reading what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detaudit.core.errors import EXIT_INTERRUPTED

SCRIPT = "repro.py"
SECONDS = 600.0
"""Longer than a script takes that ends by itself."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution of a script.

    Args:
        code: its exit code; ``None`` if it took too long.
        output: what it printed.
        results: what it measured, by setting; keys are the fields of ``parts.measure.Result``.
    """

    code: int | None
    output: str
    results: Mapping[str, Mapping[str, Any]]

    @property
    def share(self) -> float:
        """Of the runs under the first setting, those that differ."""
        first = next(iter(self.results.values()), None)
        return 0.0 if first is None else float(first["differing"]) / max(1, int(first["runs"]))

    @property
    def last_line(self) -> str:
        lines = self.output.splitlines()
        return lines[-1].strip() if lines else "it printed nothing"


def run_script(folder: Path, *arguments: str, seconds: float = SECONDS) -> Trial:
    """Run ``repro.py`` of ``folder`` with the interpreter and the environment of this process.

    Raises:
        KeyboardInterrupt: the script was interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="detaudit-") as scratch:
        numbers = Path(scratch, "numbers.json")
        command = [sys.executable, "-B", SCRIPT, *arguments, "--json", str(numbers)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(0.1, seconds),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Trial(None, f"it ran for more than {seconds:.0f} seconds", {})
        if done.returncode in (EXIT_INTERRUPTED, -2):
            raise KeyboardInterrupt
        results = json.loads(numbers.read_text(encoding="utf-8"))["results"] if numbers.exists() else {}
    return Trial(done.returncode, done.stdout.strip(), results)
