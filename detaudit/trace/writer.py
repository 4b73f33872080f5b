"""Writing a trace: one run per transaction.

Why a rollback journal and not SQLite's write-ahead log: with the log, finished runs would lie in a second
file until it is folded in, so a killed recording, copied elsewhere as the one file it seems to be, would lack
them; it needs shared memory, which network file systems do not have; and it cannot be opened for reading on
a read-only medium. With the journal the file itself holds every finished run at any moment. A process
killed in the middle of a commit leaves ``<trace>-journal`` behind, which the next reader undoes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from detaudit import __version__
from detaudit.core.errors import TraceNotWritten
from detaudit.core.recording import ModuleInfo, Run
from detaudit.trace.encoding import Encoder
from detaudit.trace.interning import text
from detaudit.trace.schema import (
    APPLICATION_ID,
    FORMAT,
    TABLES,
    VERSION,
    captures_dir,
    check_file,
    check_format,
    connect,
    writing,
)


class TraceWriter:
    """Adds runs to a trace. Several processes may each have a writer; their runs take turns.

    A context manager. Also closed when the interpreter ends. After an error in ``add_run`` the run is
    undone and the writer can be used on.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Use ``create`` or ``append``."""
        self.path = path
        self._connection = connection
        self._encoder: Encoder | None = None
        self._finalizer = weakref.finalize(self, _close, connection, os.getpid())

    @classmethod
    def create(cls, path: str | Path, meta: Mapping[str, object] | None = None) -> Self:
        """Start a new trace; an existing file is never overwritten.

        Args:
            path: its folder must exist.
            meta: JSON-compatible values by key.

        Raises:
            TraceNotWritten: the file exists, or cannot be created there.
        """
        path = Path(path)
        entries = [(text(key), json.dumps(value)) for key, value in (meta or {}).items()]
        _reserve(path)
        try:
            with writing(path):
                return cls(path, _connected(path, lambda connection: _lay_out(connection, entries)))
        except BaseException:
            for leftover in (path, Path(f"{path}-journal")):
                leftover.unlink(missing_ok=True)
            raise

    @classmethod
    def append(cls, path: str | Path) -> Self:
        """Go on with an existing trace, perhaps beside other writers.

        Raises:
            TraceUnreadable, TraceVersion: not a trace that this detaudit knows.
            TraceNotWritten: it cannot be written.
        """
        path = Path(path)
        check_file(path)
        with writing(path):
            return cls(path, _connected(path, lambda connection: _join(connection, path)))

    def add_run(self, run: Run) -> int:
        """Store a run in one transaction and return its index; a stored report is dropped, being out of date.

        Raises:
            TraceNotWritten: nothing of this run is stored, everything recorded before is kept.
        """
        with self._transaction():
            index = self._caught_up().add(run)
            self._connection.execute("DELETE FROM report")
        return index

    def add_modules(self, modules: Iterable[ModuleInfo]) -> None:
        """Make known the modules of the built model, with their aliases, whether they are called or not."""
        with self._transaction():
            tables = self._caught_up().tables
            for module in modules:
                index = tables.modules.id(module.path, module.cls, "[]")
                self._connection.execute(
                    "UPDATE module SET class = ?, aliases = ? WHERE id = ?",
                    (module.cls, json.dumps(module.aliases), index),
                )

    def relabel_runs(self, conditions: Iterable[str], condition: str) -> None:
        """Give every run of one of ``conditions`` another, as ``superseded``; a report is dropped."""
        with self._transaction():
            for old in conditions:
                self._connection.execute("UPDATE run SET condition = ? WHERE condition = ?", (condition, old))
            self._connection.execute("DELETE FROM report")

    def set_meta(self, key: str, value: object) -> None:
        """Store a JSON-compatible value by key. Raises TypeError or ValueError for another."""
        body = json.dumps(value)
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (text(key), body))

    def store_report(self, report: Mapping[str, object]) -> None:
        """Keep the analysis of all runs in the trace, in place of an earlier one."""
        body = json.dumps(report)
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO report VALUES (0, ?)", (body,))

    def close(self) -> None:
        """Leave one file behind; closing again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if not self._finalizer.alive:
            raise TraceNotWritten(
                f"cannot write the trace {self.path}: it was closed; use TraceWriter.append"
            )
        with writing(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._undo()
                raise

    def _caught_up(self) -> Encoder:
        """The encoder, knowing what other processes committed since."""
        if self._encoder is None:
            self._encoder = Encoder(self._connection)
        self._encoder.catch_up()
        return self._encoder

    def _undo(self) -> None:
        # What the encoder holds in memory may refer to rows that are gone now.
        self._encoder = None
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")


def _reserve(path: Path) -> None:
    """Create the file, empty, or say why not."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    except FileExistsError as error:
        raise TraceNotWritten(
            f"{path} exists already and a trace is never overwritten; choose another name with --output"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not path.parent.is_dir():
            raise TraceNotWritten(
                f"cannot write the trace {path}: there is no folder {path.parent}; create it first"
            ) from error
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceNotWritten(
            f"cannot write the trace {path}: {reason.lower()}; write somewhere else with --output"
        ) from error
    captures = captures_dir(path)
    if captures.exists():
        path.unlink()
        raise TraceNotWritten(
            f"{captures} exists already and holds the captured tensors of another trace; "
            "choose another name with --output"
        )


def _connected(path: Path, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    connection = connect(path, "rw")
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _join(connection: sqlite3.Connection, path: Path) -> None:
    check_format(connection, path)
    connection.execute("UPDATE trace SET open_writers = open_writers + 1")


def _lay_out(connection: sqlite3.Connection, meta: Sequence[tuple[str, str]]) -> None:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES.split(";\n"):
        connection.execute(statement)
    connection.execute("INSERT INTO trace VALUES (?, ?, ?, 1)", (FORMAT, __version__, created))
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _close(connection: sqlite3.Connection, process: int) -> None:
    # SQLite's locks belong to the process; a forked child must not touch its parent's connection.
    if os.getpid() != process:
        return
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("UPDATE trace SET open_writers = open_writers - 1")
    connection.close()
