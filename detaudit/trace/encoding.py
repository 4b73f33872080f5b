"""One run, turned into ids and columns: what happens inside the transaction of ``TraceWriter.add_run``."""

from __future__ import annotations

import json
import sqlite3
import zlib
from array import array
from collections.abc import Sequence

from detaudit.core.geometry import ITEM_BYTES, rows_differing
from detaudit.core.recording import SCALAR_PREFIX, Call, Record, Run, Value
from detaudit.trace import columns
from detaudit.trace.interning import Tables, text
from detaudit.trace.sites import RUN_LEVEL, Base, Site, Sites

KEPT_DIGESTS = 8
"""The first so many distinct digests of a site keep their leaves and raw bytes."""
RAW_BUDGET = 64 << 20
"""Bytes of small tensors kept in one trace; a generation loop would otherwise fill the disk with them."""
RAW_SCALAR_BYTES = 256
"""A scalar's text up to this length does not count against the budget."""


class Encoder:
    """Writes runs through one connection. Use within a write transaction; drop it after a rollback."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.tables = Tables(connection)
        self._sites = Sites(connection, self.tables.layouts.keys)
        self._raw_left = RAW_BUDGET - _raw_bytes(connection)
        self._place: tuple[int, int, str] = (RUN_LEVEL, 0, "")
        self._introduces = False

    def catch_up(self) -> None:
        """See what other processes committed since."""
        self.tables.catch_up()
        self._sites.catch_up()

    def add(self, run: Run) -> int:
        """Insert a run and all it refers to. Returns its index."""
        index = self._sites.next_run
        content = self._structure(run.calls)
        base = self._sites.base_of(content["module"]) if run.calls else None
        self._introduces = base is None and self._sites.can_add_base()
        self._fill(content, run.calls)
        records = {}
        for name, record in run.records.items():
            self._place = (RUN_LEVEL, 0, name)
            records[name] = self._record(record)
        self.tables.flush()
        self._insert(index, run, content, base, records)
        self._sites.add_run(index, content, records, own_base=base is None)
        return index

    def _structure(self, calls: Sequence[Call]) -> dict[str, array[int]]:
        modules, flags = self.tables.modules.id, self.tables.flags.id
        return {
            "module": columns.ints(modules(call.module, call.cls, "[]") for call in calls),
            "parent": columns.ints(call.parent for call in calls),
            "flags": columns.ints(flags((call.via, call.error)) for call in calls),
        }

    def _fill(self, content: dict[str, array[int]], calls: Sequence[Call]) -> None:
        args, state, out = columns.ints(), columns.ints(), columns.ints()
        for module, call in zip(content["module"], calls, strict=True):
            ordinal = call.ordinal
            self._place = (module, ordinal, "args")
            args.append(self._record(call.args))
            self._place = (module, ordinal, "state")
            state.append(self._record(call.state))
            self._place = (module, ordinal, "out")
            out.append(self._record(call.out))
        content.update(args=args, state=state, out=out)

    def _record(self, record: Record) -> int:
        layout = self.tables.layouts.id(tuple([site for site, _ in record]))
        value_ids = columns.to_bytes(columns.ints([self._value(site, value) for site, value in record]))
        found = self.tables.records.find(layout, value_ids)
        return self.tables.records.add(layout, value_ids) if found is None else found

    def _value(self, site: str, value: Value) -> int:
        type_ = self.tables.types.id((value.dtype, value.shape))
        found = self.tables.values.find(type_, value.root)
        return self._new_value(type_, Site(*self._place, site), value) if found is None else found

    def _new_value(self, type_: int, site: Site, value: Value) -> int:
        values = self.tables.values
        first = self._sites.first_value(site)
        if first is None and (self._introduces or site.module == RUN_LEVEL):
            return values.add(type_, value.root, value.leaves, self._keep_raw(value), None, None)
        first, digests = self._sites.count_digest(site, values.next_id, first)
        if digests <= KEPT_DIGESTS:
            return values.add(type_, value.root, value.leaves, self._keep_raw(value), None, None)
        return values.add(type_, value.root, None, None, first, self._rows(type_, first, value))

    def _rows(self, type_: int, first: int, value: Value) -> bytes | None:
        """Rows that differ from the site's first value, where the two can be compared."""
        query = "SELECT leaves FROM value WHERE id = ? AND type = ?"
        (leaves,) = self._connection.execute(query, (first, type_)).fetchone() or (None,)
        if leaves is None or value.leaves is None or value.dtype not in ITEM_BYTES:
            return None
        return columns.pack_rows(rows_differing(value.dtype, value.shape, leaves, value.leaves))

    def _keep_raw(self, value: Value) -> bytes | None:
        if value.raw is None or (
            value.dtype.startswith(SCALAR_PREFIX) and len(value.raw) <= RAW_SCALAR_BYTES
        ):
            return value.raw
        if len(value.raw) > self._raw_left:
            return None
        self._raw_left -= len(value.raw)
        return value.raw

    def _insert(
        self, index: int, run: Run, content: dict[str, array[int]], base: Base | None, records: dict[str, int]
    ) -> None:
        packed = [columns.pack(content[name], base.columns[name] if base else None) for name in columns.NAMES]
        row = (
            index,
            text(run.condition),
            run.position,
            run.process,
            run.seconds,
            len(run.calls),
            base.run if base else None,
            *packed,
            json.dumps(records),
            self._unobserved(run.unobserved),
        )
        self._connection.execute(f"INSERT INTO run VALUES (?{', ?' * (len(row) - 1)})", row)

    def _unobserved(self, unobserved: Sequence[tuple[str, str, str]]) -> int:
        items = zlib.compress(json.dumps(unobserved).encode("ascii"))
        self._connection.execute("INSERT OR IGNORE INTO unobserved (items) VALUES (?)", (items,))
        row = self._connection.execute("SELECT id FROM unobserved WHERE items = ?", (items,)).fetchone()
        return int(row[0])


def _raw_bytes(connection: sqlite3.Connection) -> int:
    query = """SELECT coalesce(sum(length(raw)), 0) FROM value JOIN type ON type.id = value.type
        WHERE NOT (dtype LIKE ? AND length(raw) <= ?)"""
    (total,) = connection.execute(query, (SCALAR_PREFIX + "%", RAW_SCALAR_BYTES)).fetchone()
    return int(total)
