"""Rules 1 and 7: the verdict in its order, and the figures that go with it."""

from __future__ import annotations

import pytest

from detaudit.compare import analyze
from detaudit.core.records import Report
from detaudit.core.stats import rate, upper_bound
from tests.compare.builder import MemoryTrace, Node, finding, kinds, node


def model(y: object, inner: object = "h") -> list[Node]:
    return [node("", "x", y, node("layer", "x", inner), node("head", inner, y))]


def test_equal_runs_are_deterministic_with_their_bound() -> None:
    trace = MemoryTrace(target="model.py", trace="t.detaudit", environment={"torch": "2.13"})
    for _ in range(20):
        trace.add(model("y"), inputs="x", final="y")
    report = analyze(trace)
    assert (report.verdict, report.exit_code) == ("deterministic", 0)
    assert (report.runs, report.runs_differing, report.distinct_outputs, report.modal_share) == (
        20,
        0,
        1,
        1.0,
    )
    assert report.rate.high == upper_bound(19)
    assert (report.target, report.trace, report.environment) == ("model.py", "t.detaudit", {"torch": "2.13"})
    assert (report.coverage["calls"], report.coverage["modules_called"]) == (3, 3)
    assert not report.origins
    assert not report.findings
    assert Report.from_json(report.to_json()) == report


def test_differing_runs_are_counted_against_the_most_common_one() -> None:
    trace = MemoryTrace()
    for y in ("a", "b", "b", "c", "b", "a"):
        trace.add(model(y), inputs="x", final=y)
    report = analyze(trace)
    assert (report.verdict, report.exit_code) == ("nondeterministic", 1)
    assert (report.runs_differing, report.distinct_outputs, report.modal_share) == (3, 3, 0.5)
    assert report.rate == rate(3, 5)
    assert [(o.module, o.call, o.runs_differing) for o in report.origins] == [("head", 0, 3)]
    assert report.conditions[0].runs_differing == 3
    assert kinds(report) == []


def test_inputs_that_differ_come_before_everything_else() -> None:
    trace = MemoryTrace()
    for x in ("p", "q", "p"):
        trace.add([node("", "same", x)], inputs={"inputs": x, "inputs.mask": "m"}, final=x)
    report = analyze(trace)
    assert (report.verdict, report.exit_code, report.origins) == ("inconclusive", 3, ())
    assert kinds(report) == ["inputs-differ"]
    assert "inputs: 2 different inputs in 3 runs" in finding(report, "inputs-differ").message
    assert report.coverage["reason"]


def test_inputs_of_hooks_off_runs_count_too() -> None:
    trace = MemoryTrace().add(model("y"), inputs="x", final="y").add(model("y"), inputs="x", final="y")
    trace.add(condition="hooks-off", inputs="other", final="z")
    assert analyze(trace).verdict == "inconclusive"


@pytest.mark.parametrize("runs", [0, 1])
def test_nothing_compared(runs: int) -> None:
    trace = MemoryTrace()
    for _ in range(runs):
        trace.add(model("y"), final="y")
    report = analyze(trace)
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    assert "nothing was compared" in report.coverage["reason"]
    assert report.rate.estimate is None


def test_nothing_observed() -> None:
    trace = MemoryTrace()
    for _ in range(3):
        trace.add([node("", {}, {})], final={})
    report = analyze(trace)
    assert report.verdict == "inconclusive"
    assert "nothing was observed" in report.coverage["reason"]


def test_a_target_without_modules_is_judged_by_its_final_output() -> None:
    same, other = MemoryTrace(), MemoryTrace()
    for index in range(3):
        same.add(inputs="x", final="y")
        other.add(inputs="x", final=index)
    assert analyze(same).verdict == "deterministic"
    report = analyze(other)
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    assert "no module was called" in finding(report, "unobserved-producer").message


def test_a_masked_difference_is_one() -> None:
    trace = MemoryTrace()
    for index in range(4):
        trace.add([node("", "x", "y", node("layer", "x", index))], inputs="x", final="y")
    report = analyze(trace)
    assert (report.verdict, report.distinct_outputs, report.runs_differing) == ("nondeterministic", 1, 3)
    assert [origin.module for origin in report.origins] == ["layer"]
    assert kinds(report) == ["masked"]


def test_gradients_count_and_those_that_some_runs_lack() -> None:
    differing, lacking = MemoryTrace(), MemoryTrace()
    for index in range(2):
        differing.add(model("y"), inputs="x", final="y", grad={"grad.weight": index})
        lacking.add(model("y"), inputs="x", final="y", more={"grad": {"grad.weight": 1}} if index else {})
    for trace in (differing, lacking):
        report = analyze(trace)
        assert (report.verdict, report.origins) == ("nondeterministic", ())
        assert kinds(report) == ["masked", "unobserved-producer"]
        assert "all calls agree" in finding(report, "unobserved-producer").message


@pytest.mark.parametrize("first", ["other", "y"])
def test_first_run_differs(first: str) -> None:
    trace = MemoryTrace()
    for index in range(5):
        trace.add(model(first if index == 0 else "y"), inputs="x", final="y")
    report = analyze(trace)
    assert ("first-run-differs" in kinds(report)) is (first == "other")
    if first == "other":
        assert finding(report, "first-run-differs").module == "head"
        assert report.verdict == "nondeterministic"


def test_a_later_run_or_two_runs_are_no_first_run() -> None:
    later, two = MemoryTrace(), MemoryTrace()
    for y in ("y", "other", "y"):
        later.add(model(y), final=y)
    for y in ("other", "y"):
        two.add(model(y), final=y)
    assert kinds(analyze(later)) == kinds(analyze(two)) == []


def test_fresh_processes_are_main_runs() -> None:
    trace = MemoryTrace()
    for process in range(3):
        trace.add(model(process), condition="fresh-process", process=process + 1, final=process)
    report = analyze(trace)
    assert (report.runs, report.verdict) == (3, "nondeterministic")
    assert [origin.module for origin in report.origins] == ["head"]


def test_another_condition_is_compared_within_itself() -> None:
    trace = MemoryTrace()
    for _ in range(3):
        trace.add(model("y"), inputs="x", final="y")
    for y in ("y", "z", "z"):
        trace.add(model(y), condition="stress", inputs="x", final=y)
    report = analyze(trace)
    assert (report.verdict, report.runs_differing) == ("nondeterministic", 0)
    assert [origin.module for origin in report.origins] == ["head"]
    assert [(c.name, c.runs, c.runs_differing, c.verdict) for c in report.conditions] == [
        ("in-process", 3, 0, "deterministic"),
        ("stress", 3, 1, "nondeterministic"),
    ]


def test_findings_of_the_audit_are_kept() -> None:
    stored = [{"kind": "fused-not-run", "module": "moe", "message": "it did not run"}]
    trace = MemoryTrace(findings=stored, restored={"buffers": 3}, coverage={"mode": "function"})
    for _ in range(2):
        trace.add(model("y"), final="y", unobserved=[("layer", "args[1]", "a file")])
    report = analyze(trace)
    assert finding(report, "fused-not-run").module == "moe"
    assert report.restored == {"buffers": 3}
    assert report.coverage["mode"] == "function"
    assert report.coverage["unobserved"] == [["layer", "args[1]", "a file", 2]]
