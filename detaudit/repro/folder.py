"""The folder: built and tried in a place of its own, moved to where it was asked for only if it works."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from detaudit.core.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NONDETERMINISTIC,
    EXIT_STABLE,
    NotReproduced,
    TraceNotWritten,
)
from detaudit.core.files import not_written
from detaudit.kernels.cases import Case
from detaudit.repro.bug_report import bug_report
from detaudit.repro.choose import Finding
from detaudit.repro.minimize import minimize
from detaudit.repro.script import build_script
from detaudit.repro.shrink import elements
from detaudit.repro.trial import SCRIPT, Trial, run_script

RUNS = 100
RELIABLE = 0.1
"""Share of runs that must differ for a smaller case to be taken: 100 runs then miss it once in 38,000."""
ENVIRONMENT, BUG_REPORT = "environment.json", "REPORT.md"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A finished folder. ``elements``, ``elements_before``: in the call's tensors, now and as captured."""

    folder: Path
    finding: Finding
    trial: Trial
    elements: int
    elements_before: int


def write_repro(
    found: Sequence[Finding],
    output: Path,
    *,
    minimize_seconds: float | None = None,
    say: Say = lambda _: None,
) -> Written:
    """Write the folder ``output`` from the first of some captured calls that differs when repeated alone.

    Args:
        found: captured calls of one origin, as `findings` gives them.
        minimize_seconds: time to spend on making the call smaller; ``None`` leaves it as it is.
        say: called with what is being done.

    Raises:
        NotReproduced: no script ended with 1; nothing is written.
        TraceNotWritten: ``output`` exists or cannot be written.
        CaseUnreadable: the captured call is damaged.
    """
    if os.path.lexists(output):
        raise TraceNotWritten(f"{output} exists already and is not overwritten; choose another with --output")
    failure: NotReproduced | None = None
    for finding in found:
        with _beside(output) as scratch:
            try:
                written = _build(finding, scratch, output, minimize_seconds, say)
            except NotReproduced as error:
                failure = failure or error
                continue
            return written
    raise failure or NotReproduced("there is no captured call to repeat")


def write_script(finding: Finding, case: Case, folder: Path) -> None:
    """The two files of the call, and the script that repeats it."""
    case.save(folder)
    title = f"{finding.module} ({finding.origin.cls}) gives different bits for the same input."
    text = build_script(finding.kind, title, threads=_threads(finding, case), runs=RUNS)
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner only, and a folder to hand on is for others


def _build(finding: Finding, scratch: Path, output: Path, seconds: float | None, say: Say) -> Written:
    whole = case = Case.load(finding.folder)
    folder = scratch / "whole"
    say(f"running the captured call of {finding.module} alone")
    write_script(finding, case, folder)
    trial = _must_differ(finding, run_script(folder))
    if seconds is not None:
        case = _smaller(finding, whole, scratch, seconds, say)
        folder = scratch / "smaller"
        write_script(finding, case, folder)
        trial = _must_differ(finding, run_script(folder))
    say(f"running it with {finding.kind.switch}")
    avoided = run_script(folder, finding.kind.switch)
    environment = json.dumps(dict(finding.report.environment), indent=2, ensure_ascii=False)
    (folder / ENVIRONMENT).write_text(environment + "\n", encoding="utf-8")
    minimized_from = None if case is whole else elements(whole)
    text = bug_report(finding, case, trial, avoided, minimized_from)
    (folder / BUG_REPORT).write_text(text, encoding="utf-8")
    try:
        folder.rename(output)
    except OSError as error:
        raise not_written(output, error) from error
    return Written(output, finding, trial, elements(case), elements(whole))


def _smaller(finding: Finding, whole: Case, scratch: Path, seconds: float, say: Say) -> Case:
    end = time.monotonic() + seconds

    def differs(candidate: Case) -> bool:
        left = end - time.monotonic()
        say(f"minimizing: trying {elements(candidate):,} of {elements(whole):,} elements ({left:.0f} s left)")
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            folder = Path(place, "candidate")
            write_script(finding, candidate, folder)
            trial = run_script(folder, seconds=left)
        return trial.code == EXIT_NONDETERMINISTIC and trial.share >= RELIABLE

    return minimize(whole, differs, seconds)


def _must_differ(finding: Finding, trial: Trial) -> Trial:
    if trial.code == EXIT_NONDETERMINISTIC:
        return trial
    known: dict[int | None, str] = {
        EXIT_STABLE: "did not differ when run alone",
        EXIT_INCONCLUSIVE: "cannot differ when run alone here",
    }
    what = known.get(trial.code, f"could not be run alone (exit status {trial.code})")
    raise NotReproduced(
        f"the captured call of {finding.module} {what}, nothing was written: {trial.last_line}"
    )


def _threads(finding: Finding, case: Case) -> int:
    """CPU threads when the call was captured."""
    settings = finding.report.environment.get("settings", {})
    return int(case.context.get("threads") or settings.get("threads") or os.cpu_count() or 1)


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A scratch folder on the file system of ``output``, so that moving there is one step.

    Folders above ``output`` are made, and taken away again if it did not come to be.
    """
    missing = [folder for folder in output.parents if not folder.exists()]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name[:100]}.", dir=output.parent) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise not_written(output, error) from error
    finally:
        if not output.exists():
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()
