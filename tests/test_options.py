"""The schedule of an audit: recorded runs with unrecorded ones among them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from detaudit.core.options import Options, command_line


@pytest.mark.parametrize("runs", [1, 2, 3, 5, 7, 20, 100])
def test_every_asked_run_is_recorded_and_the_first_always(runs: int) -> None:
    schedule = Options(runs=runs).schedule()
    assert sum(schedule) == runs
    assert schedule[0]


def test_unrecorded_runs_are_spread_and_never_next_to_each_other() -> None:
    schedule = Options(runs=20).schedule()
    positions = [position for position, recorded in enumerate(schedule) if not recorded]
    assert len(positions) == 4
    assert all(b - a > 2 for a, b in pairwise(positions))


def test_without_the_observer_control_all_runs_are_recorded() -> None:
    assert Options(runs=5, observer=False).schedule() == (True,) * 5


def test_the_words_that_make_an_audit_again() -> None:
    asked = Options(7, only=("layers.*",), exclude=("a", "b"), history=False, kernel_runs=9, capture_bytes=0)
    meta = {"mode": "script", "options": dataclasses.asdict(asked), "argv": ["--steps", "3"]}
    told = "--script --only layers.* --exclude a --exclude b --no-history --kernel-runs 9 --capture-bytes 0"
    assert command_line(meta) == (*told.split(), "--", "--steps", "3")
    assert command_line({"mode": "function", "options": dataclasses.asdict(Options(5)), "argv": []}) == ()
    assert command_line({}) == ()
