"""One audit, from the first run to the stored report.

docs/how-it-works.md tells the order of events and why it is this one.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from detaudit.core.options import Options
from detaudit.core.records import Report
from detaudit.function_audit import FunctionAudit
from detaudit.progress import Progress, Silent
from detaudit.script_audit import ScriptAudit
from detaudit.target import LoadedTarget, TargetSpec
from detaudit.trace import TraceWriter, captures_dir, open_trace


class _Audit(AbstractContextManager["_Audit"], Protocol):
    def record(self) -> None:
        """Make the recorded runs."""
        ...

    def report(self) -> Report:
        """Compare them, look closer at what differs, and tell."""
        ...


def audit(
    spec: TargetSpec,
    options: Options,
    trace: Path,
    progress: Progress | None = None,
    target: LoadedTarget | None = None,
) -> Report:
    """Audit a target, leave the trace at ``trace`` and return the report that is stored in it.

    Args:
        target: what ``spec`` names, where it is in this process already and has no file to import.

    Raises:
        TraceNotWritten: the trace exists already, or cannot be written.
        TargetRaised, TargetInvalid: the target cannot be run. What was recorded before is kept.
    """
    meta = {
        "target": spec.label,
        "trace": trace.name,
        "argv": list(spec.argv),
        "mode": "script" if spec.is_script else "function",
        "options": dataclasses.asdict(options),
    }
    shown = progress or Silent()
    trace = Path(os.path.abspath(trace))  # the target may change the folder
    with (
        chdir(os.curdir),
        _nothing_without_a_run(trace),
        TraceWriter.create(trace, meta) as writer,
    ):
        running: _Audit
        running = (
            ScriptAudit(spec, options, writer, shown)
            if spec.is_script
            else FunctionAudit(spec, options, writer, shown, target)
        )
        with running:
            running.record()
            report = running.report()
        writer.store_report(report.to_json())
    return report


@contextmanager
def _nothing_without_a_run(trace: Path) -> Iterator[None]:
    """A trace in which not even one run was finished is not left behind."""
    existed = os.path.lexists(trace)
    try:
        yield
    except BaseException:
        if not existed and trace.exists():
            with open_trace(trace) as opened:
                runs = opened.run_count
            if not runs:
                trace.unlink()
                shutil.rmtree(captures_dir(trace), ignore_errors=True)
        raise


def default_trace(spec: TargetSpec, now: datetime | None = None) -> Path:
    """A name for the trace in the current folder that no file has yet: ``model-20260131-154502.detaudit``."""
    stem = f"{spec.path.stem}-{now or datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        path = Path(f"{stem}.detaudit" if number == 1 else f"{stem}-{number}.detaudit")
        if not path.exists():
            return path
    return Path(f"{stem}.detaudit")
