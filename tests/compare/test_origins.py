"""Rules 2, 3 and 5: who is a source, who is an origin, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from detaudit.compare import analyze
from detaudit.core.records import Report
from tests.compare.builder import MemoryTrace, Node, finding, kinds, node


def audit(
    tree: Callable[[Any], Node | list[Node]], draws: Iterable[Any] = ("a", "b", "c"), **meta: object
) -> Report:
    """Runs of a tree that depends on one draw per run; the root's output is the final one."""
    trace = MemoryTrace(**meta)
    for draw in draws:
        calls = tree(draw)
        calls = calls if isinstance(calls, list) else [calls]
        trace.add(calls, inputs="x", final=dict(calls[-1].out))
    return analyze(trace)


def origins(report: Report) -> list[str]:
    return [origin.module for origin in report.origins]


def test_the_innermost_source_and_nothing_downstream() -> None:
    report = audit(
        lambda d: node(
            "", "x", ("y", d),
            node("layers.0", "x", ("l", d), node("norm", "x", "n"), node("layers.0.experts", "n", ("e", d))),
            node("layers.1", ("l", d), ("m", d), node("layers.1.experts", ("l", d), ("m", d))),
        )
    )  # fmt: skip
    assert origins(report) == ["layers.0.experts"]
    origin = report.origins[0]
    assert (origin.part, origin.after, origin.call, origin.sites) == ("module", None, 0, ("out",))
    assert (origin.runs_differing, origin.calls, origin.mechanism) == (2, 1, None)
    assert origin.numbers_reason
    assert not report.findings


def test_all_independent_origins_are_reported() -> None:
    report = audit(
        lambda d: node(
            "", "x", d, node("left", "x", ("l", d)), node("right", "x", ("r", d)), node("sum", d, d)
        )
    )
    assert origins(report) == ["left", "right"]


def test_downstream_is_judged_where_its_inputs_happen_to_agree() -> None:
    draws = [("p", 0), ("p", 1), ("q", 0)]
    report = audit(lambda d: node("", "x", d, node("first", "x", d[0]), node("second", d[0], d)), draws)
    assert origins(report) == ["first", "second"]
    assert [origin.runs_differing for origin in report.origins] == [1, 1]


def test_own_code_of_a_container_and_the_child_it_comes_after() -> None:
    report = audit(
        lambda d: node(
            "", "x", d,
            node("block", "x", d, node("block.a", "x", 1), node("block.b", 1, 2), node("block.c", d, (d, 3))),
        )
    )  # fmt: skip
    assert origins(report) == ["block"]
    assert (report.origins[0].part, report.origins[0].after) == ("own-code", "block.b")
    before_any = audit(lambda d: node("block", "x", d, node("block.a", d, (d, "a"))))
    assert (before_any.origins[0].part, before_any.origins[0].after) == ("own-code", None)
    after_all = audit(lambda d: node("block", "x", d, node("block.a", "x", "a")))
    assert (after_all.origins[0].part, after_all.origins[0].after) == ("own-code", "block.a")


def test_only_runs_with_equal_inputs_say_what_own_code_comes_after() -> None:
    draws = [("p", 0), ("p", 1), ("q", 2)]

    def tree(d: tuple[str, int]) -> list[Node]:
        return [node("source", "x", d[0]), node("block", d[0], d, node("block.a", d[0], d[0] * 2))]

    report = audit(tree, draws)
    assert [(o.module, o.part, o.after) for o in report.origins] == [
        ("source", "module", None),
        ("block", "own-code", "block.a"),
    ]


def test_excluded_children_are_not_cleared() -> None:
    def tree(d: str) -> Node:
        return node("", "x", d, node("block", "x", d, node("block.a", "x", "a")))

    report = audit(tree, excluded=["block.hidden"])
    assert (report.origins[0].part, report.origins[0].after) == ("own-code", "block.a")
    assert report.origins[0].mechanism == "own code or excluded children"
    assert report.coverage["excluded"] == ["block.hidden"]
    elsewhere = audit(tree, excluded=["other.hidden"])
    assert elsewhere.origins[0].mechanism is None


def test_children_with_unobserved_outputs_are_not_cleared() -> None:
    trace = MemoryTrace()
    for d in "ab":
        calls = [node("block", "x", d, node("block.a", "x", {}))]
        trace.add(calls, final=d, unobserved=[("block.a", "out", "a handle")])
    (origin,) = analyze(trace).origins
    assert (origin.part, origin.after) == ("module", None)
    assert "children with unobserved outputs: block.a" in str(origin.mechanism)


def test_unobserved_inputs_are_named() -> None:
    trace = MemoryTrace()
    for d in "ab":
        trace.add([node("leaf", "x", d)], final=d, unobserved=[("leaf", "args[1]", "a handle")])
    (origin,) = analyze(trace).origins
    assert origin.mechanism == "some inputs were not observed: args[1]"


def test_repeated_calls_are_told_apart() -> None:
    def tree(d: str) -> Node:
        return node("", "x", d, node("f", "x", "y"), node("f", "y", d), node("f", "x", "y"))

    report = audit(tree)
    assert [(o.module, o.call, o.calls) for o in report.origins] == [("f", 1, 1)]


def test_calls_of_one_module_are_one_origin() -> None:
    report = audit(lambda d: [node("f", i, (i, d)) for i in range(5)])
    assert [(o.module, o.call, o.calls) for o in report.origins] == [("f", 0, 5)]


def test_a_shared_module_is_judged_in_both_places() -> None:
    def tree(d: str) -> Node:
        return node(
            "",
            "x",
            d,
            node("a", "x", "y", node("shared", "x", "y")),
            node("b", "y", d, node("shared", "y", d)),
        )

    report = audit(tree)
    assert [(o.module, o.call) for o in report.origins] == [("shared", 1)]


def test_a_later_call_is_not_accused_of_what_an_earlier_one_hid() -> None:
    """The container keeps what its racy child gave it where nobody looks, and returns it in its next call."""
    report = audit(
        lambda d: [node("p", "x", "y", node("p.c", "x", d)), node("p", "x", d, node("p.c", "z", "z"))]
    )
    assert origins(report) == ["p.c"]


def test_generator_state_is_an_input() -> None:
    report = audit(lambda d: [node("drop", {"args[0]": "x", "rng.cpu": d}, d)])
    assert origins(report) == []


def test_changes_in_place_and_errors_are_outcomes() -> None:
    in_place = audit(lambda d: [node("f", "x", {"mutated.args[0]": d, "out": "y"})])
    assert in_place.origins[0].sites == ("mutated.args[0]",)
    raises = audit(lambda d: [node("f", "x", {}, error="ValueError" if d == "b" else None)])
    assert (origins(raises), raises.origins[0].sites) == (["f"], ("error",))
    assert "raises ValueError in some runs only" in finding(raises, "control-flow").message


def test_several_sites_and_one_that_some_runs_lack() -> None:
    report = audit(
        lambda d: [node("f", "x", {"out[0]": "same", "out[1]": d, **({"out[2]": 1} if d == "a" else {})})]
    )
    assert report.origins[0].sites == ("out[1]", "out[2]")


def test_rows_of_the_first_site_that_differs() -> None:
    rows = {"a": [0, 1, 2, 3], "b": [0, 9, 2, 3], "c": [0, 1, 2, 8]}
    report = audit(lambda d: [node("f", "x", rows[d])], "aabac")
    origin = report.origins[0]
    assert (origin.rows, origin.rows_differing, origin.rows_total) == ((1, 3), 2, 4)
    assert origin.runs_differing == 2


def test_many_rows_are_counted_but_not_all_listed() -> None:
    report = audit(lambda d: [node("f", "x", [(i, d) for i in range(5000)])])
    assert (len(report.origins[0].rows), report.origins[0].rows_differing) == (4096, 5000)


def test_a_scalar_has_no_rows() -> None:
    origin = audit(lambda d: [node("f", "x", d)]).origins[0]
    assert (origin.rows, origin.rows_total) == ((), None)


@pytest.mark.parametrize("draws", ["abcdefgh", "aaaabbbb", "abababab", "aaaaaaab"])
def test_the_share_of_runs_does_not_matter(draws: str) -> None:
    report = audit(lambda d: node("", "x", d, node("f", "x", d), node("g", d, (d, "g"))), draws)
    assert origins(report) == ["f"]
    most = max(draws.count(draw) for draw in draws)
    assert report.origins[0].runs_differing == report.runs_differing == len(draws) - most


def test_a_container_is_cleared_by_a_source_in_any_depth() -> None:
    report = audit(lambda d: node("", "x", d, node("a", "x", d, node("a.b", "x", d, node("a.b.c", "x", d)))))
    assert origins(report) == ["a.b.c"]
    assert kinds(report) == []
