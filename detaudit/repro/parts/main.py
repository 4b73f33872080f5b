"""The frame of a repro script: options, positive control, table, exit code."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch

from detaudit.repro.parts.case import Saved
from detaudit.repro.parts.errors import Unsupported, UsageError
from detaudit.repro.parts.measure import Result, Run, measure

STABLE, DIFFERS, UNUSABLE, UNDECIDED = 0, 1, 2, 3


class Subject(Protocol):
    """What is repeated. Made from the saved call; raises Unsupported where it cannot run, or not differ.

    ``racy`` and ``stable`` name its two settings, ``switch`` is the option that asks for the stable one.
    """

    racy: str
    stable: str
    switch: str

    def __init__(self, saved: Saved) -> None: ...

    def run(self, *, stable: bool) -> Run:
        """The call under one of the settings; each call of what is returned makes one run."""
        ...


def main(subject: type[Subject], *, threads: int, runs: int) -> int:
    """Run the script's command line and return its exit code.

    Args:
        threads: CPU threads to run with, as when the call was captured.
        runs: default of ``--runs``.
    """
    parser = argparse.ArgumentParser(description="Run one captured call again and again; compare its bits.")
    parser.add_argument(
        subject.switch, action="store_true", dest="stable", help=f"run {subject.stable} instead"
    )
    parser.add_argument("--runs", type=_positive, default=runs, help=f"runs to compare (default: {runs})")
    parser.add_argument("--seconds", type=float, default=30.0, help="begin no run after this (default: 30)")
    parser.add_argument(
        "--threads", type=_positive, default=threads, help=f"CPU threads (default: {threads})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to a file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    code, results = _decide(subject, options)
    sys.stdout.flush()
    if options.json is not None:
        body = {"exit_code": code, "results": {name: asdict(result) for name, result in results.items()}}
        options.json.write_text(json.dumps(body, indent=1), encoding="utf-8")
    return code


def _decide(subject: type[Subject], options: argparse.Namespace) -> tuple[int, dict[str, Result]]:
    results: dict[str, Result] = {}

    def run(stable: bool, enough: int = 0) -> Result:
        name = kind.stable if stable else kind.racy
        results[name] = measure(kind.run(stable=stable), options.runs, options.seconds, enough=enough)
        print(results[name].line(name), flush=True)
        return results[name]

    try:
        kind = subject(Saved(Path(__file__).resolve().parent))
        with torch.no_grad():
            control = run(False, enough=3 if options.stable else 0)
            if not options.stable:
                return (DIFFERS if control.differing else STABLE), results
            if not control.differing:
                print("The positive control did not differ, so that the rest would show nothing.")
                return UNDECIDED, results
            return (DIFFERS if run(True).differing else STABLE), results
    except Unsupported as error:
        print(f"The positive control could not run: {error}.", file=sys.stderr)
        return UNDECIDED, results
    except UsageError as error:
        print(f"repro.py: {error}", file=sys.stderr)
        return UNUSABLE, results


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
