"""Reading a trace. Nothing but the header is read until it is asked for."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
import zlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from detaudit.core.errors import TraceUnreadable
from detaudit.core.geometry import ITEM_BYTES, rows_differing
from detaudit.core.recording import ModuleInfo, RunColumns, Value
from detaudit.trace import columns
from detaudit.trace.interning import parse_shape, parse_sites
from detaudit.trace.schema import check_file, check_format, connect, reading

_NEIGHBOURS = 16


def open_trace(path: str | Path) -> Trace:
    """Open a trace for reading.

    The file is not changed, with one exception: where a writer was killed in the middle of a commit, SQLite
    undoes that half run first (on a read-only medium, in a temporary copy).

    Raises:
        TraceUnreadable: missing, not a trace, truncated or damaged; the message says what to do.
        TraceVersion: written by a version of the format that this detaudit does not know.
    """
    path = Path(path)
    check_file(path)
    with reading(path):
        return _open(path)


class Trace:
    """A recorded audit: implements ``core.recording.TraceView``. A context manager.

    What was read once is kept; open the trace again to see runs that were added since.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, copy: Path | None = None) -> None:
        """Use ``open_trace``."""
        self.path = path
        self._connection = connection
        self._copy = copy
        self._records: dict[int, tuple[tuple[str, int], ...]] = {}

    @cached_property
    def modules(self) -> Sequence[ModuleInfo]:
        rows = self._rows("SELECT path, class, aliases FROM module ORDER BY id")
        with reading(self.path):
            return [ModuleInfo(path, cls, tuple(json.loads(aliases))) for path, cls, aliases in rows]

    @cached_property
    def flags(self) -> Sequence[tuple[str, str | None]]:
        return [(via, error) for via, error in self._rows("SELECT via, error FROM flag ORDER BY id")]

    @cached_property
    def meta(self) -> Mapping[str, object]:
        rows = self._rows("SELECT key, value FROM meta ORDER BY key")
        with reading(self.path):
            return {key: json.loads(value) for key, value in rows}

    @cached_property
    def complete(self) -> bool:
        """Whether every writer closed the trace: False while recording goes on, and after a kill."""
        return bool(self._rows("SELECT open_writers = 0 FROM trace")[0][0])

    @cached_property
    def run_count(self) -> int:
        """Finished runs."""
        return int(self._rows("SELECT count(*) FROM run")[0][0])

    def report(self) -> dict[str, Any] | None:
        """The stored analysis, or None. Reads no runs."""
        rows = self._rows("SELECT body FROM report")
        with reading(self.path):
            return dict(json.loads(rows[0][0])) if rows else None

    def runs(self) -> Sequence[RunColumns]:
        """All finished runs. Columns that repeat are one and the same array: read, never change them.

        Raises:
            TraceUnreadable: there is none (the recording ended in its first run), or the file is damaged.
        """
        return self._runs

    def record(self, record_id: int) -> tuple[tuple[str, int], ...]:
        """(site path, value id) pairs, sorted by site path."""
        found = self._records.get(record_id)
        if found is None:
            self._read_records(record_id)
            found = self._records[record_id]
        return found

    def value(self, value_id: int) -> Value:
        type_, root, leaves, raw = self._row(
            "SELECT type, root, leaves, raw FROM value WHERE id = ?", value_id
        )
        with reading(self.path):
            dtype, shape = self._types[type_]
            return Value(root, dtype, shape, leaves, raw)

    def rows_differing(self, value_a: int, value_b: int) -> tuple[int, ...] | None:
        """Rows whose leaves differ; None where neither the leaves nor the rows themselves were kept."""
        if value_a == value_b:
            return ()
        query = "SELECT type, leaves, first, differing FROM value WHERE id = ?"
        type_a, leaves_a, first_a, rows_a = self._row(query, value_a)
        type_b, leaves_b, first_b, rows_b = self._row(query, value_b)
        with reading(self.path):
            dtype, shape = self._types[type_a]
            if type_a != type_b or dtype not in ITEM_BYTES:
                return None
            if leaves_a is not None and leaves_b is not None:
                return rows_differing(dtype, shape, leaves_a, leaves_b)
            if first_a == value_b and rows_a is not None:
                return columns.unpack_rows(rows_a)
            if first_b == value_a and rows_b is not None:
                return columns.unpack_rows(rows_b)
        return None

    def close(self) -> None:
        """Closing again does nothing."""
        self._connection.close()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _types(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        rows = self._rows("SELECT dtype, shape FROM type ORDER BY id")
        with reading(self.path):
            return [(dtype, parse_shape(shape)) for dtype, shape in rows]

    @cached_property
    def _layouts(self) -> Sequence[tuple[str, ...]]:
        rows = self._rows("SELECT sites FROM layout ORDER BY id")
        with reading(self.path):
            return [parse_sites(sites) for (sites,) in rows]

    @cached_property
    def _runs(self) -> Sequence[RunColumns]:
        if not self.complete:
            self._check_structure()
        unobserved = dict(self._rows("SELECT id, items FROM unobserved"))
        rows = self._rows("SELECT * FROM run ORDER BY id")
        if not rows:
            raise TraceUnreadable(
                f"{self.path} holds no finished run: its recording ended in the first one; record it again"
            )
        runs: list[RunColumns] = []
        with reading(self.path):
            for row in rows:
                runs.append(_decode(row, runs, unobserved))
        return runs

    def _check_structure(self) -> None:
        """A trace that nobody closed may be a copy taken in the middle of a commit."""
        ((state,),) = self._rows("PRAGMA quick_check(1)")
        if state != "ok":
            raise TraceUnreadable(f"{self.path} is damaged ({state}); copy it again, or record it again")

    def _read_records(self, record_id: int) -> None:
        """Read a record and its neighbours: records of one run are asked for together."""
        start = record_id - record_id % _NEIGHBOURS
        query = "SELECT id, layout, value_ids FROM record WHERE id BETWEEN ? AND ?"
        rows = self._rows(query, (start, start + _NEIGHBOURS - 1))
        with reading(self.path):
            for key, layout, value_ids in rows:
                pairs = zip(self._layouts[layout], columns.from_bytes(value_ids), strict=True)
                self._records[key] = tuple(pairs)
        if record_id not in self._records:
            raise TraceUnreadable(f"{self.path} is damaged (record {record_id} is missing); record it again")

    def _row(self, query: str, row_id: int) -> Any:
        rows = self._rows(query, (row_id,))
        if not rows:
            raise TraceUnreadable(f"{self.path} is damaged (no row {row_id} for {query!r}); record it again")
        return rows[0]

    def _rows(self, query: str, parameters: Sequence[object] = ()) -> list[Any]:
        with reading(self.path):
            return self._connection.execute(query, parameters).fetchall()


def _decode(row: Any, earlier: Sequence[RunColumns], unobserved: Mapping[int, bytes]) -> RunColumns:
    index, condition, position, process, seconds, calls, base_index, *packed, records, note = row
    if index != len(earlier):
        raise ValueError(f"run {len(earlier)} is missing")
    base = None if base_index is None else earlier[base_index]
    content: dict[str, array[int]] = {}
    for name, blob in zip(columns.NAMES, packed, strict=True):
        content[name] = columns.unpack(blob, getattr(base, name) if base else None)
        if len(content[name]) != calls:
            raise ValueError(f"column {name} of run {index} has {len(content[name])} entries, not {calls}")
    return RunColumns(
        index,
        condition,
        position,
        process,
        seconds,
        **content,
        records=json.loads(records),
        unobserved=tuple(tuple(item) for item in json.loads(zlib.decompress(unobserved[note]))),
    )


def _open(path: Path) -> Trace:
    """Connect read-only; a journal left by a killed writer is undone first."""
    connection = connect(path, "ro")
    try:
        check_format(connection, path)
        return Trace(path, connection)
    except sqlite3.OperationalError:
        connection.close()
        if not Path(f"{path}-journal").exists():
            raise
    except BaseException:
        connection.close()
        raise
    try:
        return _checked(path, connect(path, "rw"))
    except sqlite3.OperationalError:
        return _open_copy(path)


def _open_copy(path: Path) -> Trace:
    folder = Path(tempfile.mkdtemp(prefix="detaudit-"))
    try:
        for suffix in ("", "-journal"):
            shutil.copyfile(f"{path}{suffix}", folder / f"trace{suffix}")
        return _checked(path, connect(folder / "trace", "rw"), folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked(path: Path, connection: sqlite3.Connection, copy: Path | None = None) -> Trace:
    try:
        check_format(connection, path)
        connection.execute("PRAGMA query_only = ON")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.close()
        raise
    return Trace(path, connection, copy)
