"""Rules 6 and 8: history control and observer control."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from detaudit.compare import analyze
from tests.compare.builder import MemoryTrace, finding, kinds, node


def audited(main: Sequence[object], first: Sequence[object], second: Sequence[object]) -> MemoryTrace:
    """A module with hidden state: what it returns in each run of three processes."""
    trace = MemoryTrace()
    conditions = ("in-process", "history-1", "history-2")
    for process, (condition, outputs) in enumerate(zip(conditions, (main, first, second), strict=True)):
        for y in outputs:
            trace.add(
                [node("", "x", y, node("f", "x", y))],
                condition=condition,
                process=process,
                inputs="x",
                final=y,
            )
    return trace


def test_equal_sequences_mean_hidden_state() -> None:
    report = analyze(audited([0, 1, 2, 3], [0, 1, 2], [0, 1, 2]))
    assert (report.verdict, [origin.module for origin in report.origins]) == ("nondeterministic", ["f"])
    found = finding(report, "history-dependent")
    assert found.module == "f"
    assert "agree at all 3 positions" in found.message
    assert "hidden state" in str(report.origins[0].mechanism)
    assert report.coverage["history"] == {"positions": 3, "differing": 0}


@pytest.mark.parametrize(
    ("first", "second"),
    [([0, 1, 2], [0, 1, 9]), ([5, 5, 5], [5, 5, 5]), ([0], [0]), ([], [])],
    ids=["a race", "nothing varies", "one position", "not run"],
)
def test_what_does_not_mean_hidden_state(first: Sequence[object], second: Sequence[object]) -> None:
    report = analyze(audited([0, 1, 2, 3], first, second))
    assert report.verdict == "nondeterministic"
    assert kinds(report) == []
    assert report.origins[0].mechanism is None


def test_warm_up_is_both() -> None:
    report = analyze(audited([0, 1, 1, 1], [0, 1, 1], [0, 1, 1]))
    assert kinds(report) == ["first-run-differs", "history-dependent"]


def test_history_on_other_inputs_says_nothing() -> None:
    trace = audited([0, 1, 2], [], [])
    for process in (1, 2):
        for y in (0, 1):
            calls = [node("f", process, y)]
            trace.add(calls, condition=f"history-{process}", process=process, inputs=process, final=y)
    report = analyze(trace)
    assert kinds(report) == []
    assert "history" not in report.coverage


def observed(on: Sequence[object], off: Sequence[object]) -> MemoryTrace:
    trace = MemoryTrace()
    for y in on:
        trace.add([node("f", "x", y)], inputs="x", final=y)
    for y in off:
        trace.add(condition="hooks-off", inputs="x", final=y)
    return trace


def test_hooks_that_change_nothing() -> None:
    report = analyze(observed("yyyyyy", "yyy"))
    assert report.verdict == "deterministic"
    assert report.observer == {
        "runs_on": 6, "runs_off": 3, "differing_on": 0, "differing_off": 0, "p_value": 1.0, "agree": True,
    }  # fmt: skip
    assert [(c.name, c.runs, c.verdict) for c in report.conditions][1] == ("hooks-off", 3, "deterministic")


def test_other_bits_with_hooks_off() -> None:
    report = analyze(observed("yyyy", "zzz"))
    assert (report.verdict, report.origins, kinds(report)) == ("nondeterministic", (), ["observer-effect"])
    assert report.observer["agree"] is False
    assert "another" in finding(report, "observer-effect").message


def test_another_rate_with_hooks_off() -> None:
    report = analyze(observed(range(20), "yyyyyy"))
    assert kinds(report) == ["observer-effect"]
    assert report.observer["p_value"] < 0.05
    assert "19 of 19" in finding(report, "observer-effect").message
    hides = analyze(observed("y" * 20, range(6)))
    assert (hides.verdict, kinds(hides)) == ("nondeterministic", ["observer-effect"])


@pytest.mark.parametrize(("on", "off"), [(range(20), range(30, 34)), ("abab", "ba"), ("aaab", "aaa")])
def test_rates_that_do_not_disagree(on: Sequence[object], off: Sequence[object]) -> None:
    report = analyze(observed(on, off))
    assert (report.verdict, report.observer["agree"], kinds(report)) == ("nondeterministic", True, [])


def test_one_run_has_no_rate_to_compare() -> None:
    for off in "ac":
        report = analyze(observed("ab", off))
        assert (report.observer["agree"], kinds(report)) == (None, [])
    assert analyze(observed("aa", "a")).observer["agree"] is True
    assert analyze(observed("aa", "b")).observer["agree"] is False


def test_without_hooks_off_runs_there_is_nothing_to_say() -> None:
    assert analyze(observed("yy", "")).observer == {}
