"""Modules that the audit found to be handed what differs are no sources, and do not hide any."""

from __future__ import annotations

from detaudit.compare import analyze
from tests.compare.builder import MemoryTrace, Node, node


def origins(trace: MemoryTrace) -> list[str]:
    return [origin.module for origin in analyze(trace).origins]


def audit(*calls: list[Node], condition: str = "in-process", **meta: object) -> list[str]:
    trace = MemoryTrace(**meta)
    for call in calls:
        trace.add(call, inputs="x", final="y", condition=condition)
    return origins(trace)


def nested(noise: str) -> list[Node]:
    return [node("", "x", noise, node("p", "x", noise, node("p.q", "x", noise, node("p.q.l", "x", noise))))]


def test_the_code_that_made_the_value_is_accused_and_nothing_between() -> None:
    calls = nested("a"), nested("b")
    assert audit(*calls) == ["p.q.l"]
    assert audit(*calls, handed=[["p.q.l", "p"]]) == ["p"]


def beside(noise: str) -> list[Node]:
    return [node("r", "x", noise), node("p", "x", (noise, 1), node("p.l", "x", (noise, 1)))]


def test_what_another_origin_made_accuses_nobody_else() -> None:
    calls = beside("a"), beside("b")
    assert audit(*calls) == ["r", "p.l"]
    assert audit(*calls, handed=[["p.l", None]]) == ["r"]


def test_what_differs_with_that_origin_held_fixed_is_an_origin() -> None:
    trace = MemoryTrace(handed=[["p.l", None]])
    for noise in "ab":
        trace.add(beside(noise), inputs="x", final="y")
    for noise in "cd":
        held = [node("r", "x", "a"), *beside(noise)[1:]]
        trace.add(held, inputs="x", final="y", condition="held-fixed-1")
    assert origins(trace) == ["r", "p.l"]
