"""A pure-Python model of nondeterministic programs whose ground truth is known.

Modules form a tree with shared and repeated parts. Every value is a string that says how it was computed, so
equal strings mean equal bits. What a module does is a list of steps; nondeterminism enters where a step says
so and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from tests.compare.builder import MemoryTrace, Node

Kind = Literal["call", "fork", "noise", "poke", "branch", "mask"]


class Step(NamedTuple):
    """What a module does with its running value v, which begins as its input x.

    ``call``: v takes in target(v). ``fork``: v takes in target(x). ``branch``: a call, if v is even.
    ``noise``: v takes in a draw. ``poke``: v is written into an attribute of target. ``mask``: v is made of x
    anew.
    """

    kind: Kind
    target: int = 0


@dataclass(frozen=True)
class Module:
    """``counter``: an attribute counts calls, over all runs of a process, and is read. ``cache``: a buffer is
    read and written by every call, and put back between runs."""

    steps: Sequence[Step] = ()
    counter: bool = False
    cache: bool = False


@dataclass(frozen=True)
class Program:
    """``modules[0]`` is the root; a module calls later ones only. ``faces``: of the die that noise throws."""

    modules: Sequence[Module]
    faces: int = 2

    def path(self, index: int) -> str:
        return f"m{index}" if index else ""


@dataclass
class Called:
    """One call as the simulation knows it. ``entered``: its input and all state that it can reach."""

    module: int
    entered: tuple[object, ...]
    returned: object = None
    draws: list[int] = field(default_factory=list)


@dataclass
class Truth:
    """What really happened in the main runs."""

    program: Program
    runs: list[list[Called]] = field(default_factory=list)
    carried: set[int] = field(default_factory=set)
    """Modules that entered a run with state that an earlier one left behind."""

    def drawing(self) -> set[int]:
        """Modules whose own code drew from noise in any run."""
        return {call.module for run in self.runs for call in run if call.draws}

    def within(self, module: int) -> set[int]:
        """The module and all that it may call."""
        found, open_ = set(), [module]
        while open_:
            index = open_.pop()
            if index not in found:
                found.add(index)
                open_ += [s.target for s in self.program.modules[index].steps if s.kind in _CALLING]
        return found

    def proven(self) -> set[int]:
        """Modules whose k-th call, entered with the same inputs and world in two runs, left differently."""
        by_place: dict[tuple[int, int, tuple[object, ...]], set[object]] = {}
        for run in self.runs:
            ordinals: dict[int, int] = {}
            for call in run:
                ordinal = ordinals[call.module] = ordinals.get(call.module, -1) + 1
                by_place.setdefault((call.module, ordinal, call.entered), set()).add(call.returned)
        return {module for (module, _, _), returned in by_place.items() if len(returned) > 1}


_CALLING = ("call", "fork", "branch")
MAX_CALLS = 80


class TooLarge(Exception):
    """The program makes more calls than a test should look at."""


class Process:
    """Runs a program again and again. Counters and pokes stay; caches are put back before each run."""

    def __init__(self, program: Program, rng: random.Random, faces: int) -> None:
        self.program = program
        self.rng = rng
        self.faces = faces
        self.counters = [0] * len(program.modules)
        self.poked = [""] * len(program.modules)

    def run(self, truth: Truth) -> tuple[list[Node], str]:
        self.truth = truth
        self.caches = ["empty"] * len(self.program.modules)
        self.written: set[int] = set()
        self.calls: list[Called] = []
        self.seen: set[int] = set()
        tree = self._call(0, "input")
        truth.runs.append(self.calls)
        return [tree], str(tree.out["out"])

    def _call(self, index: int, x: str) -> Node:
        if len(self.calls) >= MAX_CALLS:
            raise TooLarge
        module = self.program.modules[index]
        state = self._state(index)
        if index not in self.seen and (
            self.counters[index] or (self.poked[index] and index not in self.written)
        ):
            self.truth.carried.add(index)
        self.seen.add(index)
        world = tuple(str(self._state(inner)) for inner in sorted(self.truth.within(index)))
        called = Called(index, (x, *world))
        self.calls.append(called)
        v = _hash("enter", index, x, *state.values())
        children: list[Node] = []
        for step in module.steps:
            v = self._step(step, v, x, called, children)
        if module.counter:
            self.counters[index] += 1
        if module.cache:
            self.caches[index] = _hash("cache", self.caches[index], v)
        after = self._state(index)
        out = {"out": v} | {site: after[site] for site in after if after[site] != state[site]}
        called.returned = tuple(out.items())
        return Node(self.program.path(index), {"args[0]": x}, out, state, children)

    def _state(self, index: int) -> dict[str, str]:
        module = self.program.modules[index]
        state = {"attr.poked": self.poked[index]} if self.poked[index] else {}
        if module.counter:
            state["attr.count"] = str(self.counters[index])
        if module.cache:
            state["buffer.cache"] = self.caches[index]
        return state

    def _step(self, step: Step, v: str, x: str, called: Called, children: list[Node]) -> str:
        if step.kind == "mask":
            return _hash("masked", x)
        if step.kind == "noise":
            draw = self.rng.randrange(self.faces)
            called.draws.append(draw)
            return _hash("noise", v, draw)
        if step.kind == "poke":
            self.poked[step.target] = v
            self.written.add(step.target)
            return v
        if step.kind == "branch" and int(v, 16) % 2:
            return v
        child = self._call(step.target, x if step.kind == "fork" else v)
        children.append(child)
        return _hash(step.kind, v, child.out["out"])


def simulate(program: Program, runs: int, seed: int) -> tuple[MemoryTrace, Truth]:
    """Main runs in one process, and the history control in two more, whose die has so many faces that equal
    runs there are no accident."""
    trace, truth = MemoryTrace(), Truth(program)
    process = Process(program, random.Random(seed), program.faces)
    for _ in range(runs):
        calls, final = process.run(truth)
        trace.add(calls, inputs="input", final=final)
    for number in (1, 2):
        process = Process(program, random.Random(seed + number), 1 << 40)
        for _ in range(runs):
            calls, final = process.run(Truth(program))
            trace.add(calls, condition=f"history-{number}", process=number, inputs="input", final=final)
    return trace, truth


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=6).hexdigest()
