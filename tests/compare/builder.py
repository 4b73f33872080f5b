"""Traces in memory: build the calls of a run as a nested tree, and get what ``analyze`` reads.

trace = MemoryTrace()
for noise in ("a", "b"):
    trace.add([node("layer", x="x", y=noise)], final=noise)
analyze(trace)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from detaudit.core.recording import ModuleInfo, RunColumns, Value
from detaudit.core.records import Finding, Report

Content = Mapping[str, object]


@dataclass(frozen=True)
class Node:
    """One call and the calls inside it. ``args``, ``state`` and ``out`` map site paths to values."""

    module: str
    args: Content
    out: Content
    state: Content = field(default_factory=dict)
    children: Sequence[Node] = ()
    cls: str = ""
    via: str = "call"
    error: str | None = None


def node(module: str, x: object, y: object, *children: Node, **more: Any) -> Node:
    """A call with one argument ``x`` and one output ``y``; either may be a mapping of sites instead."""
    args = x if isinstance(x, Mapping) else {"args[0]": x}
    out = y if isinstance(y, Mapping) else {"out": y}
    return Node(module, args, out, children=children, **more)


def kinds(report: Report) -> list[str]:
    """Kinds of the findings, sorted, each once."""
    return sorted({finding.kind for finding in report.findings})


def finding(report: Report, kind: str) -> Finding:
    """The only finding of a kind."""
    (found,) = [finding for finding in report.findings if finding.kind == kind]
    return found


def value(content: object) -> Value:
    """A value is told by its content: a ``Value`` is itself, a list is a tensor of rows, else a scalar."""
    if isinstance(content, Value):
        return content
    if isinstance(content, list):
        leaves = b"".join(_digest(row)[:8] for row in content)
        return Value(_digest(content), "float32", (len(content), 4), leaves=leaves)
    name = f"python.{type(content).__name__}"
    return Value(_digest((name, content)), name, raw=str(content).encode())


class MemoryTrace:
    """``TraceView`` over runs added one by one; equal content gets equal ids."""

    def __init__(self, **meta: object) -> None:
        self.meta: dict[str, object] = meta
        self.modules: list[ModuleInfo] = []
        self.flags: list[tuple[str, str | None]] = [("call", None)]
        self._module_ids: dict[str, int] = {}
        self._values: dict[tuple[bytes, str, tuple[int, ...]], int] = {}
        self._value_list: list[Value] = []
        self._records: dict[tuple[tuple[str, int], ...], int] = {}
        self._record_list: list[tuple[tuple[str, int], ...]] = []
        self._runs: list[RunColumns] = []

    def add(
        self,
        calls: Iterable[Node] = (),
        *,
        condition: str = "in-process",
        process: int = 0,
        position: int | None = None,
        unobserved: Iterable[tuple[str, str, str]] = (),
        more: Mapping[str, object] = MappingProxyType({}),
        **records: object,
    ) -> MemoryTrace:
        """Add a run. ``records`` and ``more``: by name; a plain value stands at site ``out``."""
        columns = {name: array("i") for name in ("module", "parent", "args", "state", "out", "flags")}
        for call in calls:
            self._append(columns, call, -1)
        before = sum(run.process == process for run in self._runs)
        self._runs.append(
            RunColumns(
                len(self._runs),
                condition,
                before if position is None else position,
                process,
                0.1,
                **columns,
                records={name: self._run_record(item) for name, item in (records | dict(more)).items()},
                unobserved=tuple(unobserved),
            )
        )
        return self

    def runs(self) -> Sequence[RunColumns]:
        return self._runs

    def record(self, record_id: int) -> tuple[tuple[str, int], ...]:
        return self._record_list[record_id]

    def value(self, value_id: int) -> Value:
        return self._value_list[value_id]

    def rows_differing(self, value_a: int, value_b: int) -> tuple[int, ...] | None:
        a, b = self._value_list[value_a], self._value_list[value_b]
        if a.leaves is None or b.leaves is None or a.shape != b.shape:
            return None
        rows = range(0, len(a.leaves), 8)
        return tuple(i // 8 for i in rows if a.leaves[i : i + 8] != b.leaves[i : i + 8])

    def _append(self, columns: Mapping[str, array[int]], call: Node, parent: int) -> None:
        index = len(columns["module"])
        columns["module"].append(self._module(call))
        columns["parent"].append(parent)
        columns["args"].append(self._record(call.args))
        columns["state"].append(self._record(call.state))
        columns["out"].append(self._record(call.out))
        columns["flags"].append(self._flag(call))
        for child in call.children:
            self._append(columns, child, index)

    def _module(self, call: Node) -> int:
        if call.module not in self._module_ids:
            self._module_ids[call.module] = len(self.modules)
            self.modules.append(ModuleInfo(call.module, call.cls or (call.module or "Root").title()))
        return self._module_ids[call.module]

    def _flag(self, call: Node) -> int:
        flag = (call.via, call.error)
        if flag not in self.flags:
            self.flags.append(flag)
        return self.flags.index(flag)

    def _run_record(self, content: object) -> int:
        return self._record(content if isinstance(content, Mapping) else {"out": content})

    def _record(self, content: Content) -> int:
        record = tuple(sorted((site, self._value(value(item))) for site, item in content.items()))
        if record not in self._records:
            self._records[record] = len(self._record_list)
            self._record_list.append(record)
        return self._records[record]

    def _value(self, item: Value) -> int:
        key = (item.root, item.dtype, item.shape)
        if key not in self._values:
            self._values[key] = len(self._value_list)
            self._value_list.append(item)
        return self._values[key]


def _digest(content: Hashable | list[object]) -> bytes:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()
