"""The findings that a trace holds beside its origins."""

from __future__ import annotations

import math
import struct

import pytest

from detaudit.compare import analyze
from detaudit.compare.numbers import numbers, values_equal
from detaudit.core.recording import Value
from detaudit.core.records import Report
from tests.compare.builder import MemoryTrace, finding, kinds, node


def small(dtype: str, raw: bytes, *shape: int) -> Value:
    return Value(raw.ljust(16, b"\1")[:16], dtype, shape, raw=raw)


def floats(*values: float, dtype: str = "float32", code: str = "f") -> Value:
    return small(dtype, struct.pack(f"<{len(values)}{code}", *values), len(values))


def bfloat(*values: float) -> Value:
    return small("bfloat16", b"".join(struct.pack("<f", v)[2:] for v in values), len(values))


def two_runs(a: object, b: object) -> Report:
    trace = MemoryTrace()
    for y in (a, b):
        trace.add([node("f", "x", y)], inputs="x", final=y)
    return analyze(trace)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (floats(0.0, 1.0), floats(-0.0, 1.0), True),
        (floats(1.0), floats(1.0000001), False),
        (floats(0.0, dtype="float64", code="d"), floats(-0.0, dtype="float64", code="d"), True),
        (floats(0.0, dtype="float16", code="e"), floats(-0.0, dtype="float16", code="e"), True),
        (bfloat(0.0, 2.0), bfloat(-0.0, 2.0), True),
        (bfloat(1.0), bfloat(2.0), False),
        (small("float32", b"\0\0\xc0\x7f", 1), small("float32", b"\1\0\xc0\x7f", 1), True),
        (small("int32", b"\0" * 4, 1), small("int32", b"\1" * 4, 1), False),
        (small("float8_e4m3fn", b"\0", 1), small("float8_e4m3fn", b"\x80", 1), None),
        (floats(0.0), floats(-0.0, dtype="float64", code="d"), False),
        (Value(b"a" * 16, "float32", (9,)), Value(b"b" * 16, "float32", (9,)), None),
        (Value(b"a" * 16, "python.float", raw=b"0.0"), Value(b"b" * 16, "python.float", raw=b"-0.0"), True),
    ],
)
def test_value_equal_where_the_bytes_were_kept(a: Value, b: Value, equal: bool | None) -> None:
    assert values_equal(a, b) is equal
    report = two_runs(a, b)
    assert report.origins[0].value_equal is equal
    assert ("value-equal" in kinds(report)) is bool(equal)


def test_numbers_of_a_bfloat16_are_exact() -> None:
    assert numbers(bfloat(1.5, -3.0, 0.0078125)) == (1.5, -3.0, 0.0078125)
    assert numbers(small("complex64", struct.pack("<2f", 1, 2), 1)) == (1.0, 2.0)


def test_nan_in_the_final_output() -> None:
    report = two_runs(floats(1.0, math.nan), floats(1.0, math.nan))
    assert (report.verdict, kinds(report)) == ("deterministic", ["nan"])
    assert kinds(two_runs(floats(1.0, 2.0), floats(1.0, 2.0))) == []


def test_inputs_changed_in_place_by_an_outermost_call_only() -> None:
    trace = MemoryTrace()
    for _ in range(2):
        inner = node("m.f", "x", {"out": "y", "mutated.args[0]": "z"})
        trace.add([node("m", "x", {"out": "y", "mutated.kwargs.cache": "z"}, inner)], inputs="x", final="y")
    report = analyze(trace)
    assert (report.verdict, kinds(report)) == ("deterministic", ["mutates-input"])
    assert finding(report, "mutates-input").module == "m"
    assert "kwargs.cache" in finding(report, "mutates-input").message


def test_parameters_changed_by_running_do_not_decide_the_verdict() -> None:
    trace = MemoryTrace()
    for index in range(3):
        parameters = {f"p{i}": int(i > 0 and index == 2) for i in range(9)}
        more = {0: {"parameters.before": parameters}, 1: {}, 2: {"parameters.after": parameters}}[index]
        trace.add([node("f", "x", "y")], inputs="x", final="y", more=more)
    report = analyze(trace)
    assert (report.verdict, kinds(report)) == ("deterministic", ["stateful"])
    assert "p1, p2, p3, p4, p5 and 3 more" in finding(report, "stateful").message


def test_parameters_of_another_process_are_not_compared_as_changed() -> None:
    trace = MemoryTrace()
    for process in range(2):
        trace.add(
            [node("f", "x", "y")], condition="fresh-process", process=process, final="y",
            more={"parameters.before": {"p": 0}, "parameters.after": {"p": 1}},
        )  # fmt: skip
    report = analyze(trace)
    assert (report.verdict, kinds(report)) == ("deterministic", ["stateful"])


def test_training_that_ends_with_other_parameters_is_nondeterministic() -> None:
    trace = MemoryTrace()
    for process in range(2):
        trace.add(
            [node("f", "x", "y")], condition="fresh-process", process=process, final="y",
            more={"parameters.before": {"p": 0}, "parameters.after": {"p": process + 1}},
        )  # fmt: skip
    report = analyze(trace)
    assert report.verdict == "nondeterministic"
    assert kinds(report) == ["masked", "stateful", "unobserved-producer"]


@pytest.mark.parametrize(
    ("mode", "entry", "told"),
    [
        ("function", ("", "final[1]", "an open file"), True),
        ("function", ("m", "out", "a handle"), False),
        ("script", ("m", "out", "a handle"), True),
        ("script", ("m.f", "out", "a handle"), False),
        ("script", ("m", "args[0]", "a handle"), False),
    ],
)
def test_unobserved_parts_of_the_final_output(mode: str, entry: tuple[str, str, str], told: bool) -> None:
    trace = MemoryTrace()
    trace.meta["mode"] = mode
    for _ in range(2):
        trace.add([node("m", "x", "y", node("m.f", "x", "y"))], inputs="x", final="y", unobserved=[entry])
    report = analyze(trace)
    assert report.verdict == "deterministic"
    assert ("unobserved-output" in kinds(report)) is told


def test_every_finding_has_a_page() -> None:
    report = two_runs(floats(0.0), floats(-0.0))
    assert [found.docs for found in report.findings] == ["docs/findings.md#value-equal"]
