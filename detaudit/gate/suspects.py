"""The rule "no new suspects": a static scan against the suspects that the lock file knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from detaudit.core.errors import DetauditError, LockUnreadable, TraceUnreadable
from detaudit.core.gating import Check, Status
from detaudit.core.scans import ScanReport
from detaudit.gate.lock import ADVICE, Lock
from detaudit.gate.policy import Policy
from detaudit.scan.suspects import new_suspects

MOST_LISTED = 5


def read_scan(path: Path) -> ScanReport:
    """What ``detaudit scan --format json`` wrote.

    Raises:
        TraceUnreadable, TraceVersion: it is missing, or is no such file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceUnreadable(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise TraceUnreadable(f"{path} is not JSON ({error}); scan again") from error
    if not isinstance(data, dict):
        raise TraceUnreadable(f"{path} is not a scan; write one with 'detaudit scan --format json'")
    return ScanReport.from_json(data)


def readable(scan: ScanReport) -> Check:
    """Whether there was machine code, and all of it could be read: else "none found" shows nothing."""
    problems = [f"{file.path}: {file.problem}" for file in scan.files if file.problem]
    if not scan.kernels:
        return Check("suspects", "inconclusive", "the scan read no kernel, so nothing was shown")
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        return Check("suspects", "inconclusive", f"not everything was read: {problems[0]}{more}")
    return Check("suspects", "passed", f"{len(scan.kernels)} kernels read, {len(scan.suspects)} suspects")


def suspects_checks(scan: ScanReport, lock: Lock, policy: Policy) -> Iterator[Check]:
    """The scan itself, and suspects that the lock does not know.

    Raises:
        LockUnreadable: the lock's list of suspects is damaged.
    """
    yield readable(scan)
    if lock.suspects is None:
        message = "the lock file knows no scan to compare with; detaudit gate --update --scan FILE adds one"
        yield Check("suspects", "inconclusive", message)
        return
    try:
        new = new_suspects(scan, {"suspects": list(lock.suspects)})
    except DetauditError as error:
        raise LockUnreadable(f"{policy.lock_path} is damaged ({error}); {ADVICE}") from error
    if not new:
        yield Check("suspects", "passed", "no suspect that the lock file does not know")
        return
    status: Status = "failed" if policy.new_suspects == "fail" else "passed"
    names = ", ".join(f"{kernel.short} ({kernel.arch})" for kernel in new[:MOST_LISTED])
    more = f" and {len(new) - MOST_LISTED} more" if len(new) > MOST_LISTED else ""
    yield Check(
        "suspects", status, f"{len(new)} new kernels can accumulate in an unordered way: {names}{more}"
    )
