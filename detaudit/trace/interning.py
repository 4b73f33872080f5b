"""Equal content gets one id: the tables of a trace as a writer sees them.

The maps in memory are caches of the file. Before each run they catch up with what other processes
committed, and after a rollback they are built anew. A map that grows past its limit is emptied, and the
file is asked through an index, which is only then made: a trace of ordinary size carries none.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

MAP_LIMIT = 3_000_000
"""Entries of a map in memory, about 150 bytes each."""

K = TypeVar("K")


class SmallTable(Generic[K]):
    """A table of few rows (modules, dtypes and shapes, layouts) that is kept in memory as a whole.

    Args:
        key: the columns that identify a row; ``more``: columns that go with them.
        to_row: from a key to the values of its columns; ``from_row`` is the inverse.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        table: str,
        key: Sequence[str],
        to_row: Callable[[K], tuple[Any, ...]],
        from_row: Callable[..., K],
        more: Sequence[str] = (),
    ) -> None:
        marks = ", ?" * (len(key) + len(more))
        self._connection = connection
        self._select = f"SELECT {', '.join(key)} FROM {table} WHERE id >= ? ORDER BY id"
        self._insert = f"INSERT INTO {table} (id, {', '.join((*key, *more))}) VALUES (?{marks})"
        self._to_row = to_row
        self._from_row = from_row
        self._ids: dict[K, int] = {}
        self.keys: list[K] = []

    def catch_up(self) -> None:
        """Read what was committed since; ids are consecutive from 0."""
        for row in self._connection.execute(self._select, (len(self.keys),)).fetchall():
            key = self._from_row(*row)
            self._ids[key] = len(self.keys)
            self.keys.append(key)

    def id(self, key: K, *more: object) -> int:
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.keys)
            self.keys.append(key)
            self._connection.execute(self._insert, (found, *self._to_row(key), *more))
        return found


class BigTable:
    """Values or records: rows keyed by a small id and some bytes, inserted in bulk."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        table: str,
        columns: Sequence[str],
    ) -> None:
        small, body, *extra = columns
        marks = ", ?" * (2 + len(extra))
        self._connection = connection
        self._count = f"SELECT coalesce(max(id) + 1, 0) FROM {table}"
        self._since = f"SELECT id, {small}, {body} FROM {table} WHERE id >= ?"
        self._lookup = f"SELECT id FROM {table} WHERE {body} = ? AND {small} = ?"
        self._index = f"CREATE INDEX IF NOT EXISTS {table}_{body} ON {table} ({body}, {small})"
        self._insert = f"INSERT INTO {table} (id, {', '.join(columns)}) VALUES (?{marks})"
        self._ids: dict[bytes, int] = {}
        self._next = 0
        self._complete = True
        self._pending: list[tuple[Any, ...]] = []

    def catch_up(self) -> None:
        """Read what was committed since; a table beyond the limit is left to its index."""
        (count,) = self._connection.execute(self._count).fetchone()
        if self._complete and len(self._ids) + count - self._next > MAP_LIMIT:
            self._forget()
        if self._complete:
            for key, small, body in self._connection.execute(self._since, (self._next,)):
                self._ids[_key(small, body)] = key
        self._next = count

    @property
    def next_id(self) -> int:
        """The id that ``add`` gives next."""
        return self._next

    def find(self, small: int, body: bytes) -> int | None:
        key = _key(small, body)
        found = self._ids.get(key)
        if found is None and not self._complete:
            row = self._connection.execute(self._lookup, (body, small)).fetchone()
            if row is not None:
                found = self._remember(key, row[0])
        return found

    def add(self, small: int, body: bytes, *extra: object) -> int:
        """Give the next id to content that ``find`` did not find."""
        row_id = self._next
        self._next += 1
        self._pending.append((row_id, small, body, *extra))
        return self._remember(_key(small, body), row_id)

    def flush(self) -> None:
        self._connection.executemany(self._insert, self._pending)
        self._pending.clear()

    def _remember(self, key: bytes, row_id: int) -> int:
        if len(self._ids) >= MAP_LIMIT:
            self._forget()
        self._ids[key] = row_id
        return row_id

    def _forget(self) -> None:
        self.flush()
        self._connection.execute(self._index)
        self._ids.clear()
        self._complete = False


def _key(small: int, body: bytes) -> bytes:
    return body + small.to_bytes(4, "little")


class Tables:
    """All interned tables of one trace, as one writer sees them. Use within a write transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.modules = SmallTable[str](
            connection, "module", ("path",), lambda path: (text(path),), str, more=("class", "aliases")
        )
        self.flags = SmallTable[tuple[str, str | None]](
            connection, "flag", ("via", "error"), lambda flag: flag, lambda via, error: (via, error)
        )
        self.types = SmallTable[tuple[str, tuple[int, ...]]](
            connection,
            "type",
            ("dtype", "shape"),
            lambda kind: (kind[0], ",".join(map(str, kind[1]))),
            lambda dtype, shape: (dtype, parse_shape(shape)),
        )
        self.layouts = SmallTable[tuple[str, ...]](
            connection, "layout", ("sites",), lambda sites: (json.dumps(sites),), parse_sites
        )
        self.values = BigTable(connection, "value", ("type", "root", "leaves", "raw", "first", "differing"))
        self.records = BigTable(connection, "record", ("layout", "value_ids"))

    def catch_up(self) -> None:
        for table in (self.modules, self.flags, self.types, self.layouts, self.values, self.records):
            table.catch_up()

    def flush(self) -> None:
        self.values.flush()
        self.records.flush()


def text(name: str) -> str:
    """A name as SQLite can hold it: lone surrogates are written out."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def parse_shape(shape: str) -> tuple[int, ...]:
    """``"4,8"`` to ``(4, 8)``; the empty string is a scalar's shape. Raises ValueError."""
    return tuple(map(int, shape.split(","))) if shape else ()


def parse_sites(sites: str) -> tuple[str, ...]:
    """The site paths of a layout. Raises ValueError."""
    return tuple(json.loads(sites))
