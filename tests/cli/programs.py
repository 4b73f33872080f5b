"""Running ``detaudit`` as a user does: a process of its own, with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]


SETTINGS = ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "_DETAUDIT_COMPLETE", "PYTHONUNBUFFERED")


def environment(**changes: str) -> dict[str, str]:
    """This environment without what changes how a program prints."""
    return {name: value for name, value in os.environ.items() if name not in SETTINGS} | changes


def detaudit(
    *arguments: str | Path, env: dict[str, str] | None = None, stdout: IO[str] | int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """``python -m detaudit ARGUMENTS`` with both outputs captured as text."""
    return _run(["-m", "detaudit", *map(str, arguments)], env, stdout)


def python(
    code: str, *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python program from the checkout."""
    return _run(["-c", code, *map(str, arguments)], env, subprocess.PIPE)


def _run(
    arguments: list[str], env: dict[str, str] | None, stdout: IO[str] | int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = env or environment()
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120
    )
