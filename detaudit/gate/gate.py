"""The gate itself: audits the targets, judges what they left behind, compares it with the lock file."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detaudit.compare import analyze
from detaudit.core.errors import EXIT_INCONCLUSIVE, DetauditError, PolicyInvalid
from detaudit.core.files import not_written
from detaudit.core.gating import BaselineResult, Check, GateResult, Status, TargetResult
from detaudit.core.records import Report
from detaudit.core.scans import ScanReport
from detaudit.differ.bits import Bits, bits
from detaudit.differ.environment import fingerprint
from detaudit.gate import judge
from detaudit.gate.baseline import compare_with_lock
from detaudit.gate.lock import Lock, target_bits
from detaudit.gate.policy import Policy
from detaudit.gate.recording import Recorded, record
from detaudit.gate.subjects import Subject
from detaudit.gate.suspects import read_scan, readable, suspects_checks
from detaudit.progress import Progress, Silent
from detaudit.scan.suspects import lock_suspects
from detaudit.trace import Trace, open_trace


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a trace holds: its analysis, its bits by condition, its module paths, its environment."""

    report: Report
    conditions: Mapping[str, Bits]
    modules: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(slots=True)
class Gate:
    """One gate over several subjects: ``run()`` gives the result, ``lock`` the baselines to write.

    Args:
        lock: the lock file as it is.
        scan: JSON file of a static scan, for the rule "no new suspects".
        update: whether new baselines are taken instead of compared with.
        traces: folder that keeps the traces; ``None`` to keep none.
        messages: what failed audits printed, for the terminal.
    """

    policy: Policy
    lock: Lock
    update: bool = False
    traces: Path | None = None
    scan: Path | None = None
    progress: Progress = field(default_factory=Silent)
    messages: list[str] = field(default_factory=list)

    def run(self, subjects: list[Subject]) -> GateResult:
        """Examine every subject; an audit that cannot be made is an ``error`` of its target only.

        Raises:
            PolicyInvalid: an allowance covers no module of the targets it is for.
            TraceUnreadable, TraceVersion: a given trace, or the scan, cannot be read.
            TraceNotWritten: the folder for traces cannot be made.
        """
        scan = None if self.scan is None else read_scan(self.scan)
        begun = time.monotonic()
        results: list[TargetResult] = []
        seen: list[tuple[str, tuple[str, ...]]] = []
        with self._folder() as folder:
            for number, subject in enumerate(subjects, 1):
                self.progress.describe(f"target {number} of {len(subjects)}: {subject.target.name}")
                result, evidence = self._examine(subject, folder, begun)
                results.append(result)
                if evidence is not None:
                    seen.append((subject.target.name, evidence.modules))
                self.progress.advance()
        self._check_allowances(seen, subjects)
        if self.scan is not None and scan is not None:
            results.append(self._scanned(self.scan, scan))
        source = self.policy.source
        return GateResult(tuple(results), str(source or ""), str(self.policy.lock_path))

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.traces is None:
            with tempfile.TemporaryDirectory(prefix="detaudit-") as folder:
                yield Path(folder)
            return
        try:
            self.traces.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_written(self.traces, error) from error
        yield self.traces

    def _examine(self, subject: Subject, folder: Path, begun: float) -> tuple[TargetResult, Evidence | None]:
        name = subject.target.name
        result = TargetResult(name, subject.file, ())
        trace, recorded = subject.trace, Recorded(0.0)
        if trace is None:
            limit = None if self.policy.budget is None else self.policy.budget - (time.monotonic() - begun)
            if limit is not None and limit <= 0:
                return replace(result, checks=(self._over_budget("before this target began"),)), None
            trace = _new_trace(folder, name)
            confirm = self.policy.kernels != "ignore"
            recorded = record(subject.target, Path(subject.path), trace, limit, confirm=confirm)
            result = replace(result, seconds=recorded.seconds)
        if recorded.error is not None:
            self.messages.append(recorded.shown)
            status: Status = "inconclusive" if recorded.code == EXIT_INCONCLUSIVE else "error"
            return replace(result, checks=(Check("audit", status, recorded.error),)), None
        try:
            evidence = _evidence(trace)
        except DetauditError:
            if not recorded.cut:
                raise
            return replace(result, checks=(self._over_budget("before the first run ended"),)), None
        kept = subject.trace is not None or self.traces is not None
        result = replace(result, report=evidence.report, trace=str(trace) if kept else "")
        return self._judged(result, subject, evidence, recorded.cut), evidence

    def _judged(self, result: TargetResult, subject: Subject, evidence: Evidence, cut: bool) -> TargetResult:
        report, target = evidence.report, subject.target
        checks = list(judge.judge(report, target, self.policy))
        notes = list(judge.notes(report, target, self.policy))
        if cut:
            checks.append(self._over_budget(f"after {report.runs} of {target.runs} runs"))
        baseline = None
        stable = all(c.status == "passed" for c in checks if c.name in ("evidence", "determinism"))
        if stable and not evidence.environment:
            checks += judge.no_environment(self.policy)
            notes.append("the trace holds no environment, so it has no baseline")
        elif stable:
            baseline = compare_with_lock(self.lock, target.name, evidence.environment, evidence.conditions)
            if self.update:
                self._take(target.name, evidence, baseline, notes)
            else:
                checks += judge.baseline_checks(baseline, self.policy)
                notes += judge.baseline_notes(baseline, self.policy)
        return replace(result, checks=tuple(checks), notes=tuple(notes), baseline=baseline)

    def _take(self, name: str, evidence: Evidence, baseline: BaselineResult, notes: list[str]) -> None:
        """A new baseline, for the lock file that is written if all goes well."""
        self.lock = self.lock.with_target(name, evidence.environment, target_bits(evidence.conditions))
        if baseline.comparison == "changed":
            notes.append(f"the baseline changes; {baseline.change}")

    def _scanned(self, path: Path, scan: ScanReport) -> TargetResult:
        if self.update:
            self.lock = self.lock.with_suspects(lock_suspects(scan))
            notes = [f"took {len(scan.suspects)} suspects of the scan as known"]
            return TargetResult(str(path), path.as_posix(), (readable(scan),), tuple(notes))
        checks = suspects_checks(scan, self.lock, self.policy)
        return TargetResult(str(path), path.as_posix(), tuple(checks))

    def _over_budget(self, when: str) -> Check:
        return Check("budget", "inconclusive", f"the time budget of {self.policy.budget:g} s ended {when}")

    def _check_allowances(self, seen: list[tuple[str, tuple[str, ...]]], subjects: list[Subject]) -> None:
        """An allowance for all targets is checked only where all were examined."""
        examined = {name for name, _ in seen}
        all_there = {t.name for t in self.policy.targets} <= examined and len(examined) == len(subjects)
        unknown = judge.unknown_modules(self.policy.allowances, seen)
        for allowance in unknown:
            if allowance.target in examined or (allowance.target is None and all_there):
                where = allowance.target or ", ".join(sorted(examined))
                raise PolicyInvalid(
                    f"{self.policy.source}: the allowance for '{allowance.module}' names no module "
                    f"of {where}; write the path as detaudit run shows it, or remove the allowance"
                )


def _evidence(path: Path) -> Evidence:
    with open_trace(path) as trace:
        stored = trace.report()
        report = Report.from_json(stored) if stored is not None else analyze(trace)
        environment: Any = trace.meta.get("environment")
        return Evidence(
            report=replace(report, trace=str(path)),
            conditions=bits(trace),
            modules=_module_paths(trace),
            environment=fingerprint(environment if isinstance(environment, dict) else {}),
        )


def _module_paths(trace: Trace) -> tuple[str, ...]:
    return tuple(path for module in trace.modules for path in (module.path, *module.aliases))


def _new_trace(folder: Path, name: str) -> Path:
    """A name in the folder that no trace has yet."""
    stem = re.sub(r"[^\w.-]+", "_", name).strip("._") or "target"
    for number in range(1, 100_000):
        path = folder / (f"{stem}.detaudit" if number == 1 else f"{stem}-{number}.detaudit")
        if not path.exists():
            break
    return path
