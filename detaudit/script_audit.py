"""The audit of a script target: every run is a fresh process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from detaudit.analysis import analyze_trace, coverage, key_of, merge
from detaudit.capture import NO_NUMBERS, Numbers, numbers_of
from detaudit.confirmation import confirm_cases
from detaudit.core.options import Options
from detaudit.core.recording import FRESH_PROCESS, CallKey
from detaudit.core.records import Origin, Report
from detaudit.hooks import generators
from detaudit.output import TargetOutput
from detaudit.progress import Progress
from detaudit.target import TargetSpec
from detaudit.trace import TraceWriter, captures_dir, open_trace
from detaudit.worker import Captured, Job, launch

CAPTURE_ATTEMPTS = 5
RESTORED: Mapping[str, Any] = {
    "process": "a fresh one for every run",
    "generators": "Python's, NumPy's and torch's begin every run with the same states",
}


class ScriptAudit:
    """Use as a context manager: ``record()``, then ``report()``."""

    def __init__(self, spec: TargetSpec, options: Options, writer: TraceWriter, progress: Progress) -> None:
        self.spec = spec
        self.options = options
        self.writer = writer
        self.progress = progress
        self.output = TargetOutput(writer.path)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="detaudit-")
        self._generators = Path(self._folder.name, "generators")
        self._generators.write_bytes(generators.capture().dump())
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def record(self) -> None:
        """Make the runs of the schedule, each in a process of its own."""
        schedule = self.options.schedule()
        self.progress.begin("recording", len(schedule))
        for position, recorded in enumerate(schedule):
            self.progress.describe(f"run {position + 1} of {len(schedule)}")
            self._launch(position, recorded=recorded)
            self.progress.advance()

    def report(self) -> Report:
        """Compare the runs; where they differ, run again with the origins' outputs kept."""
        left_out = [*self.options.exclude, *(f"all but {glob}" for glob in self.options.only)]
        with open_trace(self.writer.path) as trace:
            modules = list(trace.modules)
        seen = coverage(modules, [module.path for module in modules], ())
        report = analyze_trace(self.writer, {"restored": RESTORED, "coverage": seen, "excluded": left_out})
        if report.verdict == "inconclusive":
            return report
        examined, captured = self._examine(report.origins)
        kernels, findings = confirm_cases(
            captured.cases, captured.missing, report, self.options, self.progress
        )
        return merge(report, examined=examined, findings=findings, kernels=kernels)

    def _launch(self, position: int, *, recorded: bool = True, **capture: Any) -> None:
        launch(
            Job(
                spec=self.spec,
                options=self.options,
                trace=self.writer.path,
                condition=FRESH_PROCESS,
                process=position + 1,
                first_position=position,
                schedule=(recorded,),
                output=self.output.path,
                generators=self._generators,
                **capture,
            )
        )

    def _examine(self, origins: tuple[Origin, ...]) -> tuple[dict[CallKey, Origin], Captured]:
        """Numbers for the origins whose inputs agree in two further runs; what the first of these kept."""
        left = {key_of(origin): origin for origin in origins}
        examined: dict[CallKey, Origin] = {}
        if not left and not self.options.confirm:
            return examined, Captured({})
        self.progress.begin("capturing the origins", None)
        first = self._capture(0, tuple(left), cases=self.options.confirm)
        for attempt in range(1, CAPTURE_ATTEMPTS if left else 0):
            for key, call in self._capture(attempt, tuple(left)).calls.items():
                known = first.calls[key]
                if call.reason is None and call.inputs == known.inputs and call.output != known.output:
                    examined[key] = numbers_of(known.tensors, call.tensors).onto(left.pop(key))
            if not left:
                break
        for key, origin in left.items():
            reason = first.calls[key].reason or f"{NO_NUMBERS} ({CAPTURE_ATTEMPTS} runs)"
            examined[key] = Numbers(reason=reason).onto(origin)
        return examined, first

    def _capture(self, attempt: int, keys: tuple[CallKey, ...], *, cases: bool = False) -> Captured:
        file = Path(self._folder.name, f"captures-{attempt}")
        folder = captures_dir(self.writer.path) if cases else None
        position = len(self.options.schedule()) + attempt
        self._launch(position, capture=keys, captures=file, cases=folder)
        captured: Captured = torch.load(file, weights_only=False)  # written by a process of our own
        file.unlink()
        return captured
