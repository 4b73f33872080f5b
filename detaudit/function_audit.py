"""The audit of a function target: recorded runs in this process, then a closer look at what differs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self, TypeVar

from detaudit.analysis import analyze_trace, coverage, key_of, merge
from detaudit.capture import CapturePass, Handed
from detaudit.compare.classes import is_within
from detaudit.compare.handed import HANDED
from detaudit.compare.origins import remembers
from detaudit.compare.state import RACING
from detaudit.confirmation import confirm_kernels
from detaudit.core.errors import UsageError
from detaudit.core.options import Options
from detaudit.core.recording import HELD_FIXED, HISTORY, HOOKS_OFF, SUPERSEDED, CallKey
from detaudit.core.records import Finding, Origin, Report
from detaudit.environment import environment
from detaudit.execution import Session
from detaudit.hooks import generators
from detaudit.hooks.generator_survey import Survey, survey
from detaudit.operator_search import OperatorSearch
from detaudit.output import TargetOutput
from detaudit.progress import Progress
from detaudit.repro.operator_case import save_operators
from detaudit.target import LoadedTarget, TargetSpec, load
from detaudit.trace import TraceWriter, captures_dir
from detaudit.worker import Job, launch

LOOKS_BEHIND = 8
"""How often to hold the known origins fixed and look for one behind them, before the rest is left alone."""

T = TypeVar("T")


class FunctionAudit:
    """Use as a context manager: ``record()``, then ``report()``.

    Args:
        target: what ``spec`` names, where it is in this process already; otherwise the file is imported. No
            fresh process can build such a target, so ``options.history`` must be off. What it prints
            goes where it goes without an audit, and not to a file.
    """

    def __init__(
        self,
        spec: TargetSpec,
        options: Options,
        writer: TraceWriter,
        progress: Progress,
        target: LoadedTarget | None = None,
    ) -> None:
        self.spec = spec
        self.target = target
        self.options = options
        self.writer = writer
        self.progress = progress
        self.output = TargetOutput(writer.path)
        self.findings: list[Finding] = []
        self._held = 0
        self._racing: set[str] = set()
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as context:
            folder = context.enter_context(tempfile.TemporaryDirectory(prefix="detaudit-"))
            self._generators = Path(folder, "generators")
            self._generators.write_bytes(generators.capture().dump())
            if self.target is None:
                context.enter_context(self.output.collected())
            self.session = context.enter_context(Session(self.target or load(self.spec), self.options))
            self._check_globs()
            self._context = context.pop_all()
        return self

    def _check_globs(self) -> None:
        """Raises UsageError where --only matches no module: nothing would be recorded."""
        modules = self.session.recorder.modules()
        paths = [name for module in modules for name in (module.path, *module.aliases)]
        only = self.options.only
        if only and paths and not any(fnmatchcase(path, glob) for path in paths for glob in only):
            names = f"they are named like {max(paths, key=len)!r}"
            raise UsageError(f"--only {' '.join(map(repr, only))} matches no module; {names}")

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def record(self) -> None:
        """Make the runs of the schedule, each in one transaction.

        A run that changes parameters ends the sequence: it begins again with the model rebuilt for every run.
        """
        session, schedule = self.session, self.options.schedule()
        self.progress.begin("recording", len(schedule))
        self.writer.add_modules(session.recorder.modules())
        for position, recorded in enumerate(schedule):
            self.progress.describe(f"run {position + 1} of {len(schedule)}")
            checked = session.rebuild or position in (0, len(schedule) // 2, len(schedule) - 1)
            run = session.execute(recorded=recorded, parameters=checked).run
            self.writer.add_run(run)
            self.progress.advance()
            trained = run.records.get("parameters.before") != run.records.get("parameters.after")
            if trained and not session.rebuild:
                self._start_again(rebuild=True)
                return

    def report(self) -> Report:
        """Compare the runs; where they differ, look closer; rerun the kernels at fault."""
        report = self._analyze()
        examined: dict[CallKey, Origin] = {}
        if report.verdict == "nondeterministic":
            if self._survey():
                report = self._analyze()
            if self._races(report):
                report = self._analyze()
            if report.origins:
                examined = self._examine(report)
                report = self._analyze()
        kernels, found = confirm_kernels(
            self.session, report, self.options, self.progress, captures_dir(self.writer.path)
        )
        self.findings += found
        if report.verdict == "nondeterministic" and self.options.history:
            meta = self._meta()
            self._history()
            report = analyze_trace(self.writer, meta)
        return merge(report, examined=examined, findings=self.findings, kernels=kernels)

    def _start_again(self, *, rebuild: bool) -> None:
        self.writer.relabel_runs((self.session.condition, HOOKS_OFF), SUPERSEDED)
        self.session.start_again(rebuild=rebuild)
        self.record()

    def _analyze(self) -> Report:
        return analyze_trace(self.writer, self._meta())

    def _meta(self) -> dict[str, Any]:
        recorder, session = self.session.recorder, self.session
        modules = recorder.modules()
        wanted = [module.path for module in modules if recorder.wants(module.path)]
        return {
            "environment": environment(),
            "restored": session.restored(),
            "coverage": coverage(modules, wanted, session.notes),
            "excluded": sorted({module.path for module in modules} - set(wanted)),
        }

    def _survey(self) -> bool:
        """Look for generators that nobody put back; if a run uses one, record again with it put back."""
        self.progress.begin("looking for private generators", None)
        seen: list[Survey] = []
        self.session.execute(recorded=False, around=_kept(survey(), seen))
        states = self.session.generators.with_survey(seen[0])
        for name, reason in states.lost:
            message = f"{name} is drawn from and could not be put back: {reason}"
            self.findings.append(Finding("rng-consumed", None, message))
        if len(states.saved) == len(self.session.generators.saved) or self.session.rebuild:
            return False
        self.session.generators = states
        self._start_again(rebuild=False)
        return True

    def _examine(self, report: Report) -> dict[CallKey, Origin]:
        """The capture pass, again without the origins that it finds to be handed what differs."""
        self.progress.begin("capturing the origins", None)
        origins = self._to_capture(report)
        handed: list[Handed] = []
        while origins:
            captures = self._capture(origins)
            examined, findings = captures.examine()
            found, origins = self._without([*handed, *captures.handed])
            grown, handed = len(found) > len(handed), found
            if not grown:
                break
        else:
            return {}
        self.findings += [*findings, *_told(handed, origins)]
        not_captured = save_operators(captures.operators, captures_dir(self.writer.path))
        self.writer.set_meta("not_captured", not_captured)
        return {key_of(origin): origin for origin in examined}

    def _to_capture(self, report: Report) -> list[Origin]:
        """Origins that are not explained by what their module remembers alone."""
        return [origin for origin in report.origins if not remembers(origin) or origin.module in self._racing]

    def _races(self, report: Report) -> bool:
        """Look for modules that race and remember what the race made: their state is not the cause."""
        remembering = [origin for origin in report.origins if origin not in self._to_capture(report)]
        if not remembering:
            return False
        self.progress.begin("looking at what is remembered", None)
        search = OperatorSearch(self.session, self._tapped, max(10, self.options.runs))
        found = [(origin.module, search.inside(origin, {})) for origin in remembering]
        self._racing = {module for module, operator in found if operator and operator.kind == "outputs"}
        self.writer.set_meta(RACING, sorted(self._racing))
        return bool(self._racing)

    def _tapped(self, **options: Any) -> None:
        self.session.execute(condition="capture", **options)
        self.progress.advance()

    def _capture(self, origins: list[Origin]) -> CapturePass:
        """For the origins and for those that show only once the others are held fixed."""
        attempts = max(10, self.options.runs)
        captures = CapturePass(self.session, origins, attempts=attempts, advance=self.progress.advance)
        for _ in range(LOOKS_BEHIND):
            if captures.healed is not False:
                break
            self._held += 1
            for held in captures.held:
                self.writer.add_run(replace(held.run, condition=f"{HELD_FIXED}-{self._held}"))
            found = self._to_capture(self._analyze())
            if {key_of(origin) for origin in found} <= set(captures.keys):
                break
            captures = CapturePass(self.session, found, attempts=attempts, advance=self.progress.advance)
        return captures

    def _without(self, handed: Sequence[Handed]) -> tuple[list[Handed], list[Origin]]:
        """The origins but for those that were handed what differs, where others are accused instead."""
        accused = list(handed)
        while True:
            self.writer.set_meta(HANDED, [[item.module, item.maker] for item in accused])
            origins = self._to_capture(self._analyze())
            explained = [item for item in accused if _is_explained(item, origins)]
            if len(explained) == len(accused):
                return accused, origins
            accused = explained

    def _history(self) -> None:
        """The same sequence in two fresh processes, with this one's model out of the way."""
        self.progress.begin("history control", len(HISTORY))
        rebuild = self.session.rebuild
        self.session.release()
        for number, condition in enumerate(HISTORY, 1):
            self.progress.describe(f"history control: fresh process {number} of {len(HISTORY)}")
            launch(
                Job(
                    spec=self.spec,
                    options=self.options,
                    trace=self.writer.path,
                    condition=condition,
                    process=number,
                    first_position=0,
                    schedule=self.options.schedule(),
                    output=self.output.path,
                    rebuild=rebuild,
                    generators=self._generators,
                    write_unrecorded=False,
                )
            )
            self.progress.advance()


def _is_explained(handed: Handed, origins: Sequence[Origin]) -> bool:
    return any(handed.maker is None or is_within(origin.module, handed.maker) for origin in origins)


def _told(handed: Sequence[Handed], origins: Sequence[Origin]) -> Iterator[Finding]:
    """What is said of modules that read what another origin made."""
    names = ", ".join(origin.module or "the root" for origin in origins)
    for item in handed:
        if item.maker is None:
            message = (
                f"{item.module} gives different outputs for equal arguments and own state, and agrees with "
                f"the outputs of {names} held fixed: it reads what was made from them in a way that was "
                "not observed (a global, a closure, a changed parameter, an argument that cannot be seen)"
            )
            yield Finding("unobserved-producer", item.module, message)


@contextlib.contextmanager
def _kept(context: AbstractContextManager[T], into: list[T]) -> Iterator[None]:
    """``context`` with the value it gives on entry put in a list."""
    with context as value:
        into.append(value)
        yield
