"""Auditing a target for the gate: ``detaudit run`` in a process of its own.

Of its own, so that one target's settings, modules and crashes do not reach the next, and so that a time
budget can be kept even where the target hangs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from detaudit.core.errors import (
    EXIT_ERROR,
    EXIT_INCONCLUSIVE,
    EXIT_INTERRUPTED,
    EXIT_NONDETERMINISTIC,
    EXIT_STABLE,
)
from detaudit.gate.policy import TargetPolicy

GRACE_SECONDS = 10.0
"""How long a target that is over the budget may take to end by itself."""
_SLUG = re.compile(r"\s+\[[\w-]+, see docs/messages\.md#[\w-]+\]$")


@dataclass(frozen=True, slots=True)
class Recorded:
    """How an audit ended.

    Args:
        error: why it could not be made, in one line; ``None`` where it was.
        shown: what the audit printed about the error, the target's own traceback included.
        code: exit code it ends with, where there is an error.
        cut: whether it was ended because the time was over.
    """

    seconds: float
    error: str | None = None
    shown: str = ""
    code: int = EXIT_STABLE
    cut: bool = False


def record(
    target: TargetPolicy, path: Path, trace: Path, limit: float | None, *, confirm: bool = True
) -> Recorded:
    """Run the audit and leave its trace at ``trace``.

    Args:
        path: the target, ``:FACTORY`` included where one is named.
        limit: seconds; then the audit is interrupted, and what it recorded is kept.
        confirm: whether kernels are rerun alone.
    """
    begun = time.monotonic()
    with _process(_command(target, path, trace, confirm)) as process:
        try:
            _, errors = process.communicate(timeout=limit)
            cut = False
        except subprocess.TimeoutExpired:
            errors, cut = _interrupt(process), True
    seconds = time.monotonic() - begun
    code = process.returncode
    if (code in (EXIT_STABLE, EXIT_NONDETERMINISTIC, EXIT_INCONCLUSIVE) and trace.exists()) or cut:
        return Recorded(seconds, cut=cut)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    lines = errors.strip().splitlines()
    if code < 0:
        error = f"the audit ended with signal {-code}"
    else:
        error = _SLUG.sub("", lines[-1]).removeprefix("detaudit: ") if lines else f"exit code {code}"
    return Recorded(seconds, error, errors, EXIT_INCONCLUSIVE if code == EXIT_INCONCLUSIVE else EXIT_ERROR)


def _command(target: TargetPolicy, path: Path, trace: Path, confirm: bool) -> list[str]:
    command = [sys.executable, "-m", "detaudit", "run", str(path)]
    command += ["--runs", str(target.runs), "--output", str(trace)]
    command += [] if confirm else ["--no-confirm"]
    command += ["--script"] if target.script else []
    command += [word for glob in target.only for word in ("--only", glob)]
    command += [word for glob in target.exclude for word in ("--exclude", glob)]
    return [*command, "--", *target.args] if target.args else command


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, so that the workers of the audit end with it whatever happens here."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        with _ending_with_us(process):
            yield process
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@contextmanager
def _ending_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """A job that is cancelled ends this process by SIGTERM, which would leave the other session running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        _signal(process, signal.SIGKILL)
        signal.signal(number, before)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(process: subprocess.Popen[str]) -> str:
    _signal(process, signal.SIGINT)
    try:
        return process.communicate(timeout=GRACE_SECONDS)[1]
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        return process.communicate()[1]


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass
