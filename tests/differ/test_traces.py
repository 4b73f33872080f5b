"""Where two traces part, on traces built by hand."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from detaudit.core.comparison import Tolerance, TraceComparison
from detaudit.core.recording import TraceView, Value
from detaudit.differ.traces import compare_traces
from tests.compare.builder import MemoryTrace, Node, node, value

ENVIRONMENT = {
    "versions": {"torch": "2.12.0"},
    "gpu": {"driver": "550.1", "devices": []},
    "libc": "glibc 2.36",
}


def floats(*numbers: float) -> Value:
    """A float32 vector whose bytes are kept."""
    raw = struct.pack(f"<{len(numbers)}f", *numbers)
    return replace(value(list(numbers)), raw=raw, shape=(1, len(numbers)), leaves=None)


def model(first: object = "f", second: object = "s", *, inner: object = "i", state: object = 0) -> list[Node]:
    """``first`` holds ``first.inner``; ``second`` is fed by ``first``."""
    child = node("first.inner", "x", inner, state={"buffer.b": state})
    return [node("", "x", second, node("first", "x", first, child), node("second", first, second))]


def trace(calls: list[Node], *more: list[Node], final: object = None, **meta: Any) -> MemoryTrace:
    """Two equal runs of ``calls``, or one of each."""
    found = MemoryTrace(**{"target": "model.py", "environment": ENVIRONMENT, **meta})
    for run in (calls, *(more or (calls,))):
        found.add(run, final=run[0].out["out"] if final is None else final, inputs="x")
    return found


def compare(a: TraceView, b: TraceView, **options: Any) -> TraceComparison:
    return compare_traces(a, b, **options)


def test_equal() -> None:
    found = compare(trace(model()), trace(model()))
    assert (found.outcome, found.exit_code, found.calls) == ("equal", 0, 4)
    assert found.change is None


def test_the_innermost_first_call_with_equal_arguments() -> None:
    found = compare(trace(model()), trace(model("F", "S", inner="I")))
    assert (found.outcome, found.exit_code) == ("different", 1)
    assert found.change is not None
    assert (found.change.module, found.change.kind) == ("first.inner", "outputs")
    assert found.change.modules == 4
    assert [site.site for site in found.sites] == ["out"]


def test_a_container_whose_children_agree_is_named_itself() -> None:
    change = compare(trace(model()), trace(model("F", "S"))).change
    assert change is not None
    assert change.module == "first"


def test_a_later_module_alone() -> None:
    change = compare(trace(model()), trace(model("f", "S"))).change
    assert change is not None
    assert (change.module, change.modules) == ("second", 2)


def test_other_state_and_other_parameters_are_told() -> None:
    buffers = compare(trace(model()), trace(model("F", "S", inner="I", state=1))).change
    assert buffers is not None
    assert (buffers.module, buffers.kind) == ("first.inner", "state")
    one, two = (MemoryTrace(), MemoryTrace())
    for side, run, weight in ((one, model(), 1), (two, model("F", "S", inner="I"), 2)):
        parameters = {"parameters.before": {"first.inner.weight": weight, "second.weight": 0}}
        side.add(run, more=parameters).add(run)
    found = compare(one, two)
    assert found.change is not None
    assert (found.change.module, found.change.kind) == ("first.inner", "parameters")
    assert found.parameters == ("first.inner.weight",)


def test_where_no_call_has_equal_arguments_that_is_said() -> None:
    a = [node("one", "x", "y"), node("two", "p", "q")]
    b = [node("one", "x", "y"), node("two", "P", "Q")]
    change = compare(trace(a), trace(b)).change
    assert change is not None
    assert (change.module, change.kind) == ("two", "inputs")


def test_a_race_is_no_difference_between_traces() -> None:
    """``first.inner`` varies within A; B has yet another result. Nothing else can be told from that."""
    racing = trace(model("f", "s", inner="i"), model("g", "t", inner="j"))
    found = compare(racing, trace(model("h", "u", inner="k")))
    assert (found.outcome, found.exit_code) == ("inconclusive", 3)
    assert found.change is None
    assert "first.inner" in found.varying


def test_a_difference_before_a_race_is_found() -> None:
    before = node("before", "x", "y")
    racing = trace([before, *model("f", "s")], [before, *model("g", "t")], final="z")
    found = compare(racing, trace([node("before", "x", "Y"), *model()], final="z"))
    assert found.outcome == "different"
    assert found.change is not None
    assert found.change.module == "before"


def test_other_inputs_are_never_a_modules_fault() -> None:
    a, b = MemoryTrace(), MemoryTrace()
    a.add(model(), inputs="x").add(model(), inputs="x")
    b.add(model("F"), inputs="X").add(model("F"), inputs="X")
    found = compare(a, b)
    assert (found.outcome, found.change) == ("inconclusive", None)
    assert "the inputs of the two differ" in found.reason


def test_calls_on_one_side_only() -> None:
    short = trace([node("one", "x", "y")], final="y")
    long = trace([node("one", "x", "y"), node("two", "y", "z")], final="y")
    for found in (compare(short, long), compare(long, short)):
        assert found.outcome == "different"
        assert found.change is not None
        assert (found.change.module, found.change.kind) == ("two", "calls")


def test_generator_states_are_no_argument() -> None:
    """A module that draws no numbers is compared whatever the generator's state."""
    one = [node("draw", {"args[0]": "x", "rng.cpu": 1}, "y")]
    two = [node("draw", {"args[0]": "x", "rng.cpu": 2}, "y")]
    assert compare(trace(one), trace(two)).outcome == "equal"
    drawn = [node("draw", {"args[0]": "x", "rng.cpu": 2}, "Y")]
    change = compare(trace(one), trace(drawn)).change
    assert change is not None
    assert (change.module, change.kind) == ("draw", "state")


def test_the_environment_beside_it() -> None:
    newer = {**ENVIRONMENT, "versions": {"torch": "2.13.0"}, "libc": "glibc 2.39"}
    found = compare(trace(model()), trace(model("F", "S"), environment=newer))
    assert [str(change) for change in found.environment] == [
        "versions.torch: 2.12.0 -> 2.13.0",
        "libc: glibc 2.36 -> glibc 2.39",
    ]


@pytest.mark.parametrize(
    ("tolerance", "outcome"),
    [
        (None, "different"),
        (Tolerance(ulp=0), "different"),
        (Tolerance(ulp=2), "within tolerance"),
        (Tolerance(rel=1e-6), "within tolerance"),
        (Tolerance(rel=1e-8), "different"),
        (Tolerance(ulp=2, rel=1e-8), "different"),
    ],
)
def test_a_tolerance_never_makes_it_equal(tolerance: Tolerance | None, outcome: str) -> None:
    a, b = floats(1.0, 2.0), floats(1.0, 2.0000004768371582)
    found = compare(trace(model("f", a)), trace(model("f", b)), tolerance=tolerance)
    assert found.outcome == outcome
    (final,) = found.final
    assert final.max_ulp == 2
    assert final.rel_error == pytest.approx(2.1325e-7, rel=1e-3)
    same = compare(trace(model("f", a)), trace(model("f", a)), tolerance=tolerance)
    assert same.outcome == "equal"


def test_a_tolerance_on_values_that_were_not_kept_decides_nothing() -> None:
    found = compare(trace(model("f", [1, 2])), trace(model("f", [1, 3])), tolerance=Tolerance(ulp=1000))
    assert (found.outcome, found.exit_code) == ("inconclusive", 3)
    assert "4 KiB" in found.reason
    (final,) = found.final
    assert (final.rows, final.max_ulp) == ((1,), None)


def test_nan_and_another_dtype_are_beyond_any_tolerance() -> None:
    nan = compare(
        trace(model("f", floats(1.0))),
        trace(model("f", floats(float("nan")))),
        tolerance=Tolerance(ulp=1 << 60),
    )
    assert nan.outcome == "different"
    half = replace(floats(1.0), dtype="float16")
    dtype = compare(trace(model("f", floats(1.0))), trace(model("f", half)), tolerance=Tolerance(rel=1.0))
    assert dtype.outcome == "different"


def test_masked_differences_are_within_any_tolerance_and_not_equal() -> None:
    a, b = trace(model("f", "s"), final="z"), trace(model("F", "s"), final="z")
    assert compare(a, b).outcome == "different"
    assert compare(a, b, tolerance=Tolerance(ulp=0)).outcome == "within tolerance"


def test_json_holds_no_infinity() -> None:
    import json

    found = compare(trace(model("f", floats(0.0))), trace(model("f", floats(float("inf")))))
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(text)["outcome"] == "different"
