"""Differences that no call can be accused of, and generators drawn from differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from detaudit.compare import analyze
from detaudit.core.records import Report
from tests.compare.builder import MemoryTrace, Node, finding, kinds, node


def audit(tree: Callable[[Any], list[Node]], draws: Iterable[Any] = "abc") -> Report:
    trace = MemoryTrace()
    for draw in draws:
        trace.add(tree(draw), inputs="x", final=draw)
    return analyze(trace)


def test_between_the_last_call_that_agrees_and_the_first_handed_other_inputs() -> None:
    report = audit(lambda d: [node("a", "x", "y"), node("b", d, (d, 1)), node("c", (d, 1), (d, 2))])
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    found = finding(report, "unobserved-producer")
    assert found.module is None
    assert "a (call 0) agrees, then b (call 0) is handed different inputs (args[0])" in found.message


def test_inside_a_container_whose_output_agrees() -> None:
    report = audit(lambda d: [node("p", "x", "y", node("p.a", "x", "y"), node("p.b", d, d))])
    found = finding(report, "unobserved-producer")
    assert found.module == "p"
    assert "p.a (call 0) agrees, then p.b (call 0)" in found.message
    assert "in the code of p" in found.message
    first = finding(audit(lambda d: [node("p", "x", "y", node("p.b", d, d))]), "unobserved-producer")
    assert "p (call 0) was entered with the same inputs, then p.b" in first.message


def test_before_the_first_call() -> None:
    report = audit(lambda d: [node("", d, (d, "y"), node("a", d, (d, "y")))])
    assert report.origins == ()
    assert (
        "nothing was recorded before, then the root (Root) (call 0)"
        in finding(report, "unobserved-producer").message
    )


def test_the_first_module_handed_other_inputs_is_never_an_origin() -> None:
    report = audit(lambda d: [node("a", d, (d, 1), node("a.b", d, (d, 2)), node("a.c", (d, 2), (d, 1)))])
    assert report.origins == ()


def test_an_origin_explains_what_follows_but_not_what_came_before() -> None:
    draws = [("p", 0), ("p", 1), ("q", 2)]
    after = audit(lambda d: [node("a", "x", d), node("b", d, (d, 1))], draws)
    assert kinds(after) == []
    before = audit(lambda d: [node("a", "x", "y"), node("b", d[0], d)], draws)
    assert [origin.module for origin in before.origins] == ["b"]
    assert kinds(before) == ["unobserved-producer"]


def test_only_the_final_output_differs() -> None:
    found = finding(audit(lambda d: [node("a", "x", "y")]), "unobserved-producer")
    assert "all calls agree, the last being a (call 0)" in found.message


def test_parameters_that_a_step_made_different_are_named_with_their_gradients() -> None:
    trace = MemoryTrace()
    for d in "abc":
        steps = [
            node("", "x", loss, node("e", "x", y), node("h", y, (y, 1)))
            for loss, y in (("l", "y"), (d, (d, 1)))
        ]
        after = {"e.w": d, "h.w": (d, 2)}
        gradients = {"grad.e.w": (d, 3), "grad.h.w": (d, 4)}
        more = {"parameters.before": {"e.w": 0, "h.w": 0}, "parameters.after": after, "grad": gradients}
        trace.add(steps, inputs="x", final="z", more=more)
    report = analyze(trace)
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    found = finding(report, "unobserved-producer")
    assert "e (call 1) is the first to give different outputs for equal arguments" in found.message
    assert "differs at the end of the run (e.w, grad.e.w)" in found.message


def test_only_hooks_off_runs_differ() -> None:
    trace = MemoryTrace()
    for _ in range(3):
        trace.add([node("a", "x", "y")], inputs="x", final="y")
    for y in ("y", "z"):
        trace.add(condition="hooks-off", inputs="x", final=y)
    report = analyze(trace)
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    assert "hooks off" in finding(report, "unobserved-producer").message


def test_generator_drawn_from_differently() -> None:
    report = audit(
        lambda d: [
            node("a", {"args[0]": "x", "rng.cpu": 0}, "y"),
            node("b", {"args[0]": "y", "rng.cpu": 1}, "z"),
            node("c", {"args[0]": "z", "rng.cpu": (2, d)}, "u"),
            node("d", {"args[0]": "u", "rng.cpu": (3, d)}, d),
        ]
    )
    found = finding(report, "rng-consumed")
    assert found.module == "b"
    assert "agrees on entry to b (call 0) and differs on entry to c (call 0)" in found.message
    assert report.origins == ()


def test_generator_that_differs_from_the_start() -> None:
    report = audit(lambda d: [node("a", {"args[0]": "x", "rng.cuda:0": d}, d)])
    found = finding(report, "rng-consumed")
    assert found.module is None
    assert "(cuda:0) already differs on entry to the first call, a (call 0)" in found.message


def test_generator_state_that_follows_from_other_arguments_is_not_told() -> None:
    report = audit(
        lambda d: [
            node("race", {"args[0]": "x", "rng.cpu": 0}, d),
            node("sample", {"args[0]": d, "rng.cpu": (1, d)}, (d, 1)),
        ]
    )
    assert [origin.module for origin in report.origins] == ["race"]
    assert kinds(report) == []


def test_generator_found_in_a_run_that_makes_other_calls() -> None:
    def tree(d: str) -> list[Node]:
        more = [node("retry", {"args[0]": "x", "rng.cpu": 0}, "y")] if d == "b" else []
        return [
            *more,
            node("a", {"args[0]": "x", "rng.cpu": 0}, "y"),
            node("b", {"args[0]": "y", "rng.cpu": d}, d),
        ]

    report = audit(tree)
    assert finding(report, "rng-consumed").module == "a"
    assert finding(report, "control-flow").module is None
