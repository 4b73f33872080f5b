"""Rule 3, the module's own state: carried over, written in the run, or recorded once a run only."""

from __future__ import annotations

import pytest

from detaudit.compare import analyze
from detaudit.core.records import Report
from tests.compare.builder import MemoryTrace, Node, finding, kinds, node


def origins(report: Report) -> list[str]:
    return [origin.module for origin in report.origins]


def counting(count: int, x: object = "x") -> Node:
    """A module that counts its calls in an attribute, and whose output depends on it."""
    state = {"attr.step": count}
    return node(
        "", x, ("y", x, count), node("c", x, {"attr.step": count + 1, "out": (x, count)}, state=state)
    )


def test_a_counter_is_an_origin_and_its_container_is_not() -> None:
    trace = MemoryTrace()
    for index in range(4):
        trace.add([counting(index)], inputs="x", final=index)
    report = analyze(trace)
    assert (report.verdict, origins(report)) == ("nondeterministic", ["c"])
    assert report.origins[0].sites == ("out",)
    assert "attr.step" in str(report.origins[0].mechanism)
    assert (finding(report, "history-dependent").module, report.origins[0].part) == ("c", "module")


def test_tensors_that_a_racing_module_left_in_its_state_are_no_cause() -> None:
    def audit(*state: str, **meta: object) -> Report:
        trace = MemoryTrace(**meta)
        for index in range(3):
            before = {site: [index] if site == "attr.pool" else index for site in state}
            after = {site: [index + 1] if site == "attr.pool" else index + 1 for site in state}
            trace.add([node("c", "x", after | {"out": index}, state=before)], inputs="x", final=index)
        return analyze(trace)

    assert "attr.pool" in str(audit("attr.pool").origins[0].mechanism)
    racing = audit("attr.pool", racing=["c"])
    assert (origins(racing), racing.origins[0].mechanism) == (["c"], None)
    assert finding(racing, "history-dependent").message.endswith("races, and may have left it so")
    counting_too = audit("attr.pool", "attr.step", racing=["c"])
    assert counting_too.origins[0].mechanism is None
    assert "attr.step" in finding(counting_too, "history-dependent").message
    maybe = audit("attr.step")
    assert maybe.origins[0].mechanism == "perhaps own state that already differed on entry: attr.step"


def test_counters_beside_a_race_do_not_hide_where_it_begins() -> None:
    """Every module counts its calls; only one races, and others pass on what they are handed."""
    trace = MemoryTrace()
    for index in range(4):

        def counts(name: str, x: object, y: object, *inner: Node, step: int = index) -> Node:
            return node(name, x, {"attr.n": step + 1, "out": y}, *inner, state={"attr.n": step})

        gate = counts("mlp.gate", "x", "g")
        experts = counts("mlp.experts", "g", ("e", index))
        head = counts("head", ("e", index), ("h", index))
        trace.add([counts("mlp", "x", ("e", index), gate, experts), head], inputs="x", final=index)
    report = analyze(trace)
    assert origins(report) == ["mlp.experts"]
    assert report.origins[0].sites == ("out",)
    assert {f.module for f in report.findings if f.kind == "history-dependent"} == {
        "mlp", "mlp.gate", "mlp.experts", "head",
    }  # fmt: skip


def test_a_counter_that_changes_no_output_is_told_and_does_not_decide() -> None:
    trace = MemoryTrace()
    for index in range(3):
        trace.add([node("c", "x", "y", state={"attr.step": index})], inputs="x", final="y")
    report = analyze(trace)
    assert (report.verdict, report.origins, report.runs_differing) == ("deterministic", (), 0)
    assert kinds(report) == ["history-dependent"]
    assert "attr.step" in finding(report, "history-dependent").message
    assert "no output shows it" in finding(report, "history-dependent").message


def test_state_made_differently_from_equal_state_decides() -> None:
    trace = MemoryTrace()
    for noise in ("a", "b", "c"):
        trace.add([node("c", "x", {"out": "y", "attr.sum": noise}, state={"attr.sum": 0})], final="y")
    report = analyze(trace)
    assert (report.verdict, origins(report)) == ("nondeterministic", ["c"])


def test_state_that_reaches_an_output_decides() -> None:
    trace = MemoryTrace()
    for index in range(3):
        trace.add([node("c", "x", index, state={"attr.step": index})], final=index)
    assert analyze(trace).verdict == "nondeterministic"


def test_large_state_that_changes_no_output_is_told_and_does_not_decide() -> None:
    trace = MemoryTrace()
    for index in range(3):
        trace.add([node("c", "x", "y")], final="y", more={"large.start": {"c:buffer.cache": index}})
    report = analyze(trace)
    assert (report.verdict, kinds(report)) == ("deterministic", ["history-dependent"])
    assert "c:buffer.cache" in finding(report, "history-dependent").message


def test_a_counter_behind_a_race_is_found_by_what_the_last_run_left() -> None:
    trace = MemoryTrace()
    for index in range(4):
        trace.add([node("race", "x", -index), counting(index, -index)], inputs="x", final=index)
    report = analyze(trace)
    assert origins(report) == ["race"]
    assert finding(report, "history-dependent").module == "c"


def test_state_written_from_a_difference_is_an_input() -> None:
    """Code outside of any call put the racing output into the attribute: nothing says it was carried over."""
    trace = MemoryTrace()
    for index in (5, 7, 9):
        trace.add(
            [node("race", "x", index), node("user", "x", (index, "y"), state={"attr.mask": index})],
            final=index,
        )
    report = analyze(trace)
    assert origins(report) == ["race"]
    assert kinds(report) == []


def test_state_written_earlier_in_the_run_by_the_module_itself() -> None:
    trace = MemoryTrace()
    for index in range(3):
        step = node(
            "", "t", ("u", index), node("attn", "t", {"out": ("o", index)}, state={"buffer.kv": index})
        )
        first = node("attn", index, {"buffer.kv": index, "out": ("p", index)}, state={"buffer.kv": "empty"})
        trace.add([node("race", "x", index), first, step], inputs="x", final=index)
    assert origins(analyze(trace)) == ["race"]


def test_a_container_is_judged_where_the_state_inside_agrees() -> None:
    trace = MemoryTrace()
    for index, extra in ((0, "p"), (0, "q"), (1, "p")):
        inner = node("c", "x", (index, "c"), state={"attr.step": index})
        trace.add([node("block", "x", (index, extra), inner)], inputs="x", final=(index, extra))
    report = analyze(trace)
    assert origins(report) == ["c"], "the container too is a source, but one with an origin inside"


def test_own_code_that_writes_state_into_its_child() -> None:
    """First runs of three processes differ already: the child's state was made in the run, around it."""

    def run(draw: int) -> list[Node]:
        return [node("block", "x", draw, node("block.c", "x", (draw, "c"), state={"attr.noise": draw}))]

    trace = MemoryTrace()
    for index in range(3):
        trace.add(run(index), inputs="x", final=index)
    assert origins(analyze(trace)) == ["block.c"], (
        "without another process there is nothing to tell them apart"
    )
    for process in (1, 2):
        for index in range(3):
            draw = 10 * process + index
            trace.add(run(draw), condition=f"history-{process}", process=process, inputs="x", final=draw)
    report = analyze(trace)
    assert [(o.module, o.part) for o in report.origins] == [("block", "own-code")]


@pytest.mark.parametrize("record", ["large.start", "parameters.before"])
def test_state_recorded_once_that_differs_before_the_run(record: str) -> None:
    site = "attn:buffer.kv" if record == "large.start" else "attn.weight"
    trace = MemoryTrace()
    for index in range(3):
        calls = [node("", "x", index, node("attn", "x", index))]
        trace.add(calls, inputs="x", final=index, more={record: {site: index}})
    report = analyze(trace)
    assert (origins(report), report.verdict) == (["attn"], "nondeterministic")
    assert site in str(report.origins[0].mechanism)
    assert "history-dependent" in kinds(report)


def test_parameters_that_fresh_processes_begin_with_accuse_no_module() -> None:
    trace = MemoryTrace()
    for index in range(3):
        trace.add(
            [node("", "x", (index, "y"), node("linear", "x", index))],
            condition="fresh-process", process=index, final=index,
            more={"parameters.before": {"linear.weight": index}},
        )  # fmt: skip
    report = analyze(trace)
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    assert "linear.weight" in finding(report, "stateful").message


def test_a_large_cache_written_in_the_run_excuses_later_calls() -> None:
    trace = MemoryTrace()
    for index in range(3):
        calls = [
            node("race", "x", index),
            node("attn", index, (index, "first")),
            node("block", "t", (index, "u"), node("attn", "t", (index, "second"))),
        ]
        trace.add(
            calls,
            final=index,
            more={"large.start": {"attn:buffer.kv": 0}, "large.end": {"attn:buffer.kv": index}},
        )
    assert origins(analyze(trace)) == ["race"]


def test_parameters_updated_in_the_run_excuse_later_calls() -> None:
    trace = MemoryTrace()
    for index in range(3):
        calls = [
            node("", "x", index, node("body", "x", "h"), node("head", "h", index)),
            node(
                "", "x", (index, 2), node("body", "x", (index, "h2")), node("head", (index, "h2"), (index, 3))
            ),
        ]
        trace.add(
            calls, condition="fresh-process", process=index, final=index,
            more={"parameters.before": {"body.weight": 0}, "parameters.after": {"body.weight": index}},
        )  # fmt: skip
    report = analyze(trace)
    assert [(o.module, o.call, o.calls) for o in report.origins] == [("head", 0, 1)]
