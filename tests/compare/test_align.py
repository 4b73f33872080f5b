"""Rule 4: where runs make different calls, and what is still compared behind that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from detaudit.compare import analyze
from detaudit.compare.align import align
from detaudit.compare.classes import group
from detaudit.core.records import Report
from tests.compare.builder import MemoryTrace, Node, finding, kinds, node


def audit(*runs: Sequence[Node], final: object = None) -> Report:
    trace = MemoryTrace()
    for index, calls in enumerate(runs):
        trace.add(calls, inputs="x", final=index if final is None else final)
    return analyze(trace)


def leaf(name: str, x: object = "x", y: object = "y") -> Node:
    return node(name, x, y)


def matched(*runs: Sequence[Node]) -> list[tuple[str, str]]:
    """For each node its module and in which of the (distinct) runs it is."""
    trace = MemoryTrace()
    for calls in runs:
        trace.add(calls)
    aligned = align(trace, group(trace.runs()))
    found = []
    for index, module in enumerate(aligned.module):
        present = sorted(m for k in aligned.present(index) for m in aligned.classes[k].members)
        found.append((trace.modules[module].path, "".join(map(str, present))))
    return found


def test_located_at_the_innermost_module_that_holds_the_first_difference() -> None:
    def run(*inside: Node) -> list[Node]:
        return [node("", "x", "y", node("a", "x", "y", node("a.b", "x", "y", *inside)), leaf("c"))]

    report = audit(run(leaf("a.b.1")), run(leaf("a.b.1")), run(leaf("a.b.1"), leaf("a.b.2")))
    found = finding(report, "control-flow")
    assert found.module == "a.b"
    assert "1 of 3 runs" in found.message
    assert "a call of a.b.2 instead of no further call" in found.message
    assert report.coverage["unmatched_calls"] == 1
    assert report.coverage["unmatched"] == [["a.b.2", 0, 1]]
    assert report.verdict == "nondeterministic"


def test_another_module_in_the_same_place() -> None:
    report = audit([node("r", "x", "y", leaf("p"))], [node("r", "x", "y", leaf("q"))])
    found = finding(report, "control-flow")
    assert found.module == "r"
    assert "a call of q instead of a call of p" in found.message


def test_outside_of_all_modules() -> None:
    found = finding(audit([leaf("p")], [leaf("p"), leaf("p")]), "control-flow")
    assert found.module is None
    assert "outside of all modules" in found.message


def test_a_random_branch_is_the_own_code_of_its_module() -> None:
    def run(name: str) -> list[Node]:
        return [node("r", "x", name, leaf("first"), node(name, "y", name))]

    report = audit(run("p"), run("q"), run("p"))
    assert [(o.module, o.part, o.after) for o in report.origins] == [("r", "own-code", "first")]


def test_origins_behind_the_first_difference_are_found() -> None:
    report = audit(
        [leaf("a"), leaf("more"), leaf("b", "x", 1), leaf("c")],
        [leaf("a"), leaf("b", "x", 2), leaf("c")],
        [leaf("a"), leaf("more"), leaf("b", "x", 3), leaf("c")],
    )
    assert [(o.module, o.runs_differing) for o in report.origins] == [("b", 2)]


def test_calls_that_the_most_common_run_lacks_are_compared_too() -> None:
    common = [leaf("a"), leaf("z")]
    report = audit(
        common,
        common,
        common,
        [leaf("a"), leaf("e", "x", 1), leaf("z")],
        [leaf("a"), leaf("e", "x", 2), leaf("z")],
    )
    assert [origin.module for origin in report.origins] == ["e"]


def test_the_same_arguments_find_each_other() -> None:
    one, two, three = (leaf("f", x, x) for x in "abc")
    runs = [node("r", "x", "y", one, two, three)], [node("r", "x", "y", two, three)]
    assert matched(*runs) == [("r", "01"), ("f", "01"), ("f", "01"), ("f", "0")]


def test_children_of_matched_calls_are_matched() -> None:
    step = node("step", "s", "t", leaf("in"), leaf("out"))
    runs = [leaf("x"), step, step], [step, step]
    assert matched(*runs) == [
        ("x", "0"), ("step", "01"), ("in", "01"), ("out", "01"), ("step", "01"), ("in", "01"), ("out", "01"),
    ]  # fmt: skip


def test_another_order_of_equal_calls_is_not_a_difference_of_bits() -> None:
    """As with two threads: every call finds its counterpart."""
    report = audit([leaf("a"), leaf("b")], [leaf("b"), leaf("a")], [leaf("a"), leaf("b")], final="y")
    assert (report.verdict, report.runs_differing) == ("deterministic", 0)
    assert report.conditions[0].verdict == "deterministic"
    assert kinds(report) == ["control-flow"]


@pytest.mark.parametrize("via", ["forward", "graph"])
def test_how_a_module_was_called_is_part_of_the_sequence(via: str) -> None:
    report = audit([node("f", "x", "y")], [node("f", "x", "y", via=via)], final="y")
    assert report.verdict == "nondeterministic"
    assert kinds(report) == ["control-flow", "masked", "unobserved-producer"]


def test_an_exception_is_located_at_the_innermost_call_that_raises() -> None:
    def run(error: str | None) -> list[Node]:
        inner = node("a.b", "x", {} if error else {"out": "y"}, error=error)
        return [node("", "x", "y", node("a", "x", {} if error else {"out": "y"}, inner, error=error))]

    report = audit(run(None), run("RuntimeError"), run(None), final="y")
    assert finding(report, "control-flow").module == "a.b"
    assert [origin.module for origin in report.origins] == ["a.b"]


def test_every_run_has_a_sequence_of_its_own() -> None:
    runs = [[leaf("a"), *[leaf("b", i, i) for i in range(n)], leaf("c", "x", n)] for n in range(6)]
    report = audit(*runs)
    assert [origin.module for origin in report.origins] == ["c"]
    assert report.origins[0].runs_differing == 5
