"""Which value a site had first, and how many since: what decides whether a new value keeps its leaves.

A site is (module, ordinal of its call, part, site path); its part is ``args``, ``state`` or ``out``, or the
name of a run-level record. The first value of a site is looked up in the first run of each structure
(sequence of modules), so nothing is kept per site until a site varies.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from detaudit.trace import columns
from detaudit.trace.interning import text

MAX_BASES = 4
"""Runs of so many different structures serve as the base of later ones (24 bytes a call in memory)."""
RUN_LEVEL = -1
"""Stands for the module where a record belongs to the whole run."""


@dataclass(slots=True)
class Base:
    """The first run of its structure: what later runs of that structure are stored against."""

    run: int
    columns: Mapping[str, array[int]]
    _positions: dict[tuple[int, int], int] = field(default_factory=dict)

    def position(self, module: int, ordinal: int) -> int | None:
        """Index of a call in this run."""
        if not self._positions:
            seen: dict[int, int] = {}
            for index, called in enumerate(self.columns["module"]):
                count = seen[called] = seen.get(called, -1) + 1
                self._positions[called, count] = index
        return self._positions.get((module, ordinal))


@dataclass(frozen=True, slots=True)
class Site:
    module: int
    ordinal: int
    part: str
    path: str


class Sites:
    """The sites of a trace, as one writer sees them. Use within a write transaction."""

    def __init__(self, connection: sqlite3.Connection, layouts: Sequence[tuple[str, ...]]) -> None:
        """``layouts``: site paths by layout id, kept up to date by the caller."""
        self._layouts = layouts
        self._connection = connection
        self._bases: list[Base] = []
        self._run_records: dict[str, int] = {}
        self._runs = 0

    def catch_up(self) -> None:
        """Read what was committed since by other processes."""
        query = (
            f"SELECT id, calls, base, records, {', '.join(columns.NAMES)} FROM run WHERE id >= ? ORDER BY id"
        )
        for run, calls, base, records, *packed in self._connection.execute(query, (self._runs,)).fetchall():
            own = calls and base is None and len(self._bases) < MAX_BASES
            content = {
                name: columns.unpack(blob, None)
                for name, blob in zip(columns.NAMES, packed, strict=True)
                if own
            }
            self.add_run(run, content, json.loads(records), own_base=bool(own))

    @property
    def next_run(self) -> int:
        return self._runs

    def base_of(self, module: array[int]) -> Base | None:
        """The base whose sequence of modules is this one."""
        return next((base for base in self._bases if base.columns["module"] == module), None)

    def can_add_base(self) -> bool:
        return len(self._bases) < MAX_BASES

    def add_run(
        self, run: int, content: Mapping[str, array[int]], records: Mapping[str, int], *, own_base: bool
    ) -> None:
        """Take note of a run; ``own_base`` if it is the first of its structure."""
        self._runs = run + 1
        if own_base and content["module"] and self.can_add_base():
            self._bases.append(Base(run, content))
        for name, record in records.items():
            self._run_records.setdefault(name, record)

    def first_value(self, site: Site) -> int | None:
        """The value that the site had in the first run that has it."""
        if site.module == RUN_LEVEL:
            return self._value_at(self._run_records.get(site.part), site.path)
        for base in self._bases:
            position = base.position(site.module, site.ordinal)
            if position is not None:
                found = self._value_at(base.columns[site.part][position], site.path)
                if found is not None:
                    return found
        return None

    def count_digest(self, site: Site, value: int, first: int | None) -> tuple[int, int]:
        """Count one more digest first seen at this site: (the site's first value, digests so far)."""
        key = (site.module, site.ordinal, text(site.part), text(site.path))
        row = self._connection.execute(
            "SELECT first, digests FROM varying WHERE module = ? AND call = ? AND part = ? AND site = ?", key
        ).fetchone()
        if row is None:
            known, digests = (value, 1) if first is None else (first, 2)
        else:
            known, digests = row[0], row[1] + 1
        self._connection.execute(
            "INSERT OR REPLACE INTO varying VALUES (?, ?, ?, ?, ?, ?)", (*key, known, digests)
        )
        return known, digests

    def _value_at(self, record: int | None, path: str) -> int | None:
        row = self._connection.execute(
            "SELECT layout, value_ids FROM record WHERE id = ?", (record,)
        ).fetchone()
        sites = self._layouts[row[0]] if row else ()
        return columns.from_bytes(row[1])[sites.index(path)] if path in sites else None
