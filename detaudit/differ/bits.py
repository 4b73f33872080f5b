"""What the runs of one condition of a trace computed: digests of each call's arguments, state and outputs.

Ids of records hold within one trace only; the digests here can be compared between traces, machines and
months. They cover site paths, dtypes, shapes and roots.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, count
from operator import ne
from typing import NamedTuple

from detaudit.compare.classes import FINAL, INPUTS, group
from detaudit.core.recording import (
    HELD_FIXED,
    HISTORY,
    HOOKS_OFF,
    SUPERSEDED,
    RunColumns,
    TraceView,
    Value,
)

VARIES = "varies"
"""In place of a digest: the runs of the trace do not agree."""
ABSENT = "absent"
PARAMETERS = "parameters.before"
GENERATOR = "rng."
DIGEST_BYTES = 8
Key = tuple[str, int]
"""(module path, ordinal of the call)."""


class Content(NamedTuple):
    """Digests of what was passed to a call, of what it found on entry, and of what came out.

    What it found: the module's buffers and attributes, and generator states. These stand apart from the
    arguments, since few modules draw numbers, and attributes change from version to version.
    """

    args: str
    state: str
    out: str


@dataclass(frozen=True, slots=True)
class CallBits:
    """One call. ``parent`` is an index into ``Bits.calls`` or -1; digests are 16 hex digits or ``VARIES``."""

    module: str
    cls: str
    ordinal: int
    parent: int
    content: Content

    @property
    def key(self) -> Key:
        return self.module, self.ordinal


NOT_CALLED = Content(ABSENT, ABSENT, ABSENT)


@dataclass(frozen=True, slots=True)
class Bits:
    """All calls of the most common run of a condition, in execution order.

    ``parameters``: one digest for the parameters that a module owns itself, by its path.
    """

    condition: str
    runs: int
    calls: tuple[CallBits, ...]
    inputs: str
    final: str
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        return self.final == VARIES or any(VARIES in call.content for call in self.calls)


def bits(view: TraceView) -> dict[str, Bits]:
    """The bits of every condition that was recorded call by call, by its name.

    Controls are left out: what a run with outputs held fixed computes depends on which run they are from.

    Raises:
        TraceUnreadable: the trace is damaged, or holds no finished run.
    """
    by_condition: dict[str, list[RunColumns]] = {}
    for run in view.runs():
        if not run.condition.startswith((HOOKS_OFF, SUPERSEDED, HELD_FIXED, *HISTORY)):
            by_condition.setdefault(run.condition, []).append(run)
    digests = _Digests(view)
    parameters = digests.parameters([run for runs in by_condition.values() for run in runs])
    return {name: _bits(view, name, runs, digests, parameters) for name, runs in by_condition.items()}


class _Digests:
    """Digests of a trace's records, each computed once."""

    def __init__(self, view: TraceView) -> None:
        self._view = view
        self.record: Callable[[int], str] = cache(lambda record: digest(self._lines(record)))
        self.passed: Callable[[int], str] = cache(lambda args: digest(self._lines(args, (False,))))
        self.found: Callable[[int, int], str] = cache(
            lambda args, state: digest([*self._lines(args, (True,)), *self._lines(state)])
        )

    def _lines(self, record_id: int, generators: tuple[bool, ...] = (True, False)) -> list[bytes]:
        view = self._view
        return [
            line(site, view.value(value))
            for site, value in view.record(record_id)
            if site.startswith(GENERATOR) in generators
        ]

    def parameters(self, runs: Sequence[RunColumns]) -> dict[str, str]:
        """By the path of the module that owns them; from the first run that has them."""
        record = next((run.records[PARAMETERS] for run in runs if PARAMETERS in run.records), None)
        if record is None:
            return {}
        owned: dict[str, list[bytes]] = {}
        for site, value in self._view.record(record):
            owned.setdefault(site.rpartition(".")[0], []).append(line(site, self._view.value(value)))
        return {module: digest(lines) for module, lines in owned.items()}

    def of_runs(self, runs: Sequence[RunColumns], name: str) -> str:
        found = {run.records.get(name) for run in runs}
        if len(found) > 1:
            return VARIES
        (record,) = found
        return ABSENT if record is None else self.record(record)


def digest(lines: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"\n".join(lines), digest_size=DIGEST_BYTES).hexdigest()


def line(site: str, value: Value) -> bytes:
    return f"{site}|{value.dtype}|{value.shape}|{value.root.hex()}".encode("utf-8", "surrogatepass")


def _bits(
    view: TraceView, name: str, runs: list[RunColumns], digests: _Digests, parameters: Mapping[str, str]
) -> Bits:
    classes = group(runs)
    reference = classes[0].run
    apart: dict[int, set[Content]] = {}
    for item in classes[1:]:
        for index, content in _where_apart(reference, item.run, digests):
            apart.setdefault(index, set()).add(content)
    calls: list[CallBits] = []
    for index, (module, ordinal) in enumerate(_keys(reference)):
        content = _content_at(reference, index, digests)
        if index in apart:
            every = zip(content, *apart[index], strict=True)
            content = Content(*(part[0] if len(set(part)) == 1 else VARIES for part in every))
        info = view.modules[module]
        calls.append(CallBits(info.path, info.cls, ordinal, reference.parent[index], content))
    inputs, final = digests.of_runs(runs, INPUTS), digests.of_runs(runs, FINAL)
    return Bits(name, len(runs), tuple(calls), inputs, final, parameters)


def _where_apart(
    reference: RunColumns, other: RunColumns, digests: _Digests
) -> Iterator[tuple[int, Content]]:
    """Calls of the reference that ``other`` has with other content, or lacks."""
    if reference.module == other.module:
        parts = ((reference.args, other.args), (reference.state, other.state), (reference.out, other.out))
        for index in sorted({i for a, b in parts for i in compress(count(), map(ne, a, b))}):
            yield index, _content_at(other, index, digests)
        return
    found = {key: index for index, key in enumerate(_keys(other))}
    for index, key in enumerate(_keys(reference)):
        yield index, _content_at(other, found[key], digests) if key in found else NOT_CALLED


def _keys(run: RunColumns) -> list[tuple[int, int]]:
    seen: Counter[int] = Counter()
    keys = []
    for module in run.module:
        keys.append((module, seen[module]))
        seen[module] += 1
    return keys


def _content_at(run: RunColumns, index: int, digests: _Digests) -> Content:
    args, state, out = run.args[index], run.state[index], run.out[index]
    return Content(digests.passed(args), digests.found(args, state), digests.record(out))
