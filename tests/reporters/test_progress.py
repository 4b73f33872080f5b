"""The progress bar, on a real pseudo-terminal in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = """
import contextlib, io, sys, time
from detaudit.reporters.progress import progress
with progress(3, "auditing model.py") as bar:
    for step in range(3):
        with contextlib.redirect_stdout(io.StringIO()):
            print("swallowed by the target")
        time.sleep({seconds})
        print("print of run", step)
        bar.describe(f"run {{step}}")
        bar.advance()
    bar.begin("more work", 7)
    bar.advance(5)
    bar.begin("who knows", None)
    bar.advance()
print("stdout is itself:", sys.stdout is sys.__stdout__)
"""


def on_terminal(seconds: float, stdout: int | None = None) -> tuple[str, str]:
    """(what the terminal got on stderr, what a pipe got on stdout)."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WORK.format(seconds=seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    printed = process.communicate()[0]
    assert process.returncode == 0
    return shown.decode(), printed.decode()


def test_shown_after_a_second_and_apart_from_the_prints() -> None:
    shown, printed = on_terminal(0.6)
    assert "3/3" in shown
    assert "5/7" in shown
    assert "1/?" in shown
    assert "left" in shown
    assert "print of run" not in shown
    assert printed.splitlines() == [*(f"print of run {n}" for n in range(3)), "stdout is itself: True"]


def test_not_shown_within_a_second() -> None:
    shown, _ = on_terminal(0.0)
    assert "auditing" not in shown
    assert "run" not in shown


def test_silent_without_a_terminal() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WORK.format(seconds=0.5)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stderr == ""
