"""Runs of a target in a fresh process: every run of a script, and the history control of a function target.

The auditing process writes a job file, starts ``main`` in a fresh process and waits. The worker
appends its runs to the trace and leaves a result file; what went wrong in it is raised again by the auditing
process.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from detaudit.capture import Kept, keep
from detaudit.core import errors
from detaudit.core.errors import EXIT_INTERRUPTED, DetauditError, TargetRaised
from detaudit.core.options import Options
from detaudit.core.recording import HOOKS_OFF
from detaudit.core.records import KernelReport
from detaudit.environment import environment
from detaudit.execution import Execution, Session
from detaudit.hooks.functions import FunctionTap
from detaudit.hooks.recorder import Recorder
from detaudit.kernels.cases import Case
from detaudit.scripted import execute_script
from detaudit.target import TargetSpec, load


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do.

    Args:
        condition: of the recorded runs.
        process: identifies the worker in the trace.
        first_position: of its first run.
        schedule: for each run in order, whether it is recorded.
        rebuild: whether the model is built again for every run.
        output: file that takes what the target prints.
        generators: file with the generator states to begin with.
        write_unrecorded: whether runs that are not recorded go into the trace, as ``hooks-off``.
        capture: (module path, call) pairs whose outputs are kept in the file ``captures``, a ``Captured``;
            such a run does not go into the trace.
        cases: folder where one call of each kernel in those calls (in any, if there are none) becomes a case.
    """

    spec: TargetSpec
    options: Options
    trace: Path
    condition: str
    process: int
    first_position: int
    schedule: tuple[bool, ...]
    output: Path
    rebuild: bool = False
    generators: Path | None = None
    write_unrecorded: bool = True
    capture: tuple[tuple[str, int], ...] = ()
    captures: Path | None = None
    cases: Path | None = None

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> Job:
        data = json.loads(text)
        spec = data["spec"]
        options: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()
        }
        paths = {name: None if data[name] is None else Path(data[name]) for name in _PATHS}
        return cls(
            **{
                **data,
                **paths,
                "spec": TargetSpec(Path(spec["path"]), spec["factory"], tuple(spec["argv"])),
                "options": Options(**options),
                "schedule": tuple(data["schedule"]),
                "capture": tuple((module, call) for module, call in data["capture"]),
            }
        )


LAST_LINES = 15
"""Of what a failed process printed, shown with the error."""

_PATHS = ("trace", "output", "generators", "captures", "cases")


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture run of a script kept. ``missing``: reports on kernel calls that became no case."""

    calls: Mapping[tuple[str, int], Kept]
    cases: Sequence[Case] = ()
    missing: Sequence[KernelReport] = ()


_PARENT = str(Path(__file__).resolve().parent.parent)
_ENTRY = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from detaudit.worker import main; raise SystemExit(main(sys.argv[1:]))"
)
"""Not ``-m``: a ``random.py`` in the current folder would then stand for Python's own. Where detaudit itself
is not installed, it is found behind everything else."""


def launch(job: Job) -> None:
    """Do a job in a fresh process and wait for it.

    Raises:
        TargetRaised: the target raised, called ``sys.exit`` with a failure, or took its process down.
        DetauditError: whatever else the worker could not do.
        KeyboardInterrupt: the worker was interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="detaudit-") as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(job.dumps())
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with job.output.open("ab") as output:
            printed_before = output.tell()
            command = [sys.executable, "-P", "-c", _ENTRY, _PARENT, str(job_file), str(result_file)]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        result = json.loads(result_file.read_text()) if result_file.exists() else None
    if result is None or done.returncode == EXIT_INTERRUPTED:
        if done.returncode in (EXIT_INTERRUPTED, -2):
            raise KeyboardInterrupt
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        process = f"{job.spec.path}: the process of run {job.first_position + 1}"
        message = f"{process} ended with {how} before the run was over"
        raise TargetRaised(message, _last_words(job.output, printed_before))
    error = result["error"]
    if error is not None and error["class"] is None:
        raise RuntimeError(f"the worker of run {job.first_position + 1} failed:\n{error['message']}")
    if error is not None:
        raise _rebuild(error, _last_words(job.output, printed_before))


def _last_words(output: Path, start: int) -> str:
    """The last lines that a process printed, behind ``start`` in the file; empty if it printed nothing."""
    text = output.read_bytes()[start:].decode(errors="backslashreplace")
    return "".join(text.splitlines(keepends=True)[-LAST_LINES:])


def _rebuild(error: dict[str, Any], printed: str) -> DetauditError:
    kind = getattr(errors, error["class"], DetauditError)
    if kind is TargetRaised:
        return TargetRaised(error["message"], error["frames"] or printed)
    rebuilt: DetauditError = kind(error["message"])
    return rebuilt


def work(job: Job) -> None:
    """Do a job in this process."""
    from detaudit.hooks import generators
    from detaudit.trace import TraceWriter

    if job.generators is not None:
        generators.load(job.generators.read_bytes())
    with TraceWriter.append(job.trace) as writer:
        if job.captures is not None:
            torch.save(_capture(job), job.captures)
            return
        for execution in _script_runs(job) if job.spec.is_script else _function_runs(job):
            if execution.run.condition != HOOKS_OFF or job.write_unrecorded:
                writer.add_run(execution.run)
        if job.spec.is_script and job.first_position == 0:
            writer.set_meta("environment", environment())


def _capture(job: Job) -> Captured:
    """One run of a script with calls kept and, where ``job.cases`` is a folder, kernel calls as cases."""
    from detaudit.kernel_calls import kernel_tap, not_kept, save_cases

    taps: list[FunctionTap] = []

    def tap(recorder: Recorder) -> FunctionTap:
        origins: dict[str, int | None] = dict.fromkeys(module for module, _ in job.capture)
        taps.append(kernel_tap(recorder.current_call, origins, job.options.capture_bytes))
        return taps[0]

    [execution] = _script_runs(job, tap if job.cases else None)
    calls = [call for each in taps for call in each.calls]
    cases = save_cases(calls, job.cases) if job.cases else []
    return Captured(keep(execution), cases, list(not_kept(calls)))


def _function_runs(job: Job) -> Iterator[Execution]:
    target = load(job.spec)
    with Session(target, job.options, condition=job.condition, process=job.process) as session:
        session.rebuild = job.rebuild
        for recorded in job.schedule:
            yield session.execute(recorded=recorded, capture=job.capture)


def _script_runs(job: Job, tap: Callable[[Recorder], FunctionTap] | None = None) -> Iterator[Execution]:
    for offset, recorded in enumerate(job.schedule):
        yield execute_script(
            job.spec,
            job.options,
            condition=job.condition,
            position=job.first_position + offset,
            process=job.process,
            recorded=recorded,
            capture=job.capture,
            tap=tap,
        )


def main(argv: Sequence[str]) -> int:
    """Entry point of the worker process; 0 also where the target failed, which the result file says."""
    job_file, result_file = Path(argv[0]), Path(argv[1])
    error: dict[str, Any] | None = None
    try:
        work(Job.loads(job_file.read_text()))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except DetauditError as caught:
        frames = getattr(caught, "frames", "")
        error = {"class": type(caught).__name__, "message": str(caught), "frames": frames}
    except Exception:
        error = {"class": None, "message": traceback.format_exc()}
    result_file.write_text(json.dumps({"error": error}))
    return 0
