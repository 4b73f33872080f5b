"""The tables of a trace, its version, and how SQLite's complaints become one line for the user.

Version history (``PRAGMA user_version``): 1, first version.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detaudit.core.errors import DetauditError, TraceNotWritten, TraceUnreadable, TraceVersion

FORMAT = "detaudit-trace"
VERSION = 1
APPLICATION_ID = 0x64744175
"""``dtAu``, bytes 68 to 71 of the file: tells a trace from any other SQLite file."""
BUSY_SECONDS = 60.0
"""How long to wait while another process commits its run."""

TABLES = """
CREATE TABLE trace (format TEXT NOT NULL, written_by TEXT NOT NULL, created TEXT NOT NULL,
    open_writers INTEGER NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE report (id INTEGER PRIMARY KEY CHECK (id = 0), body TEXT NOT NULL);
CREATE TABLE module (id INTEGER PRIMARY KEY, path TEXT NOT NULL, class TEXT NOT NULL, aliases TEXT NOT NULL);
CREATE TABLE flag (id INTEGER PRIMARY KEY, via TEXT NOT NULL, error TEXT);
CREATE TABLE type (id INTEGER PRIMARY KEY, dtype TEXT NOT NULL, shape TEXT NOT NULL);
CREATE TABLE layout (id INTEGER PRIMARY KEY, sites TEXT NOT NULL);
CREATE TABLE value (id INTEGER PRIMARY KEY, type INTEGER NOT NULL, root BLOB NOT NULL, leaves BLOB, raw BLOB,
    first INTEGER, differing BLOB);
CREATE TABLE record (id INTEGER PRIMARY KEY, layout INTEGER NOT NULL, value_ids BLOB NOT NULL);
CREATE TABLE varying (module INTEGER NOT NULL, call INTEGER NOT NULL, part TEXT NOT NULL, site TEXT NOT NULL,
    first INTEGER NOT NULL, digests INTEGER NOT NULL, PRIMARY KEY (module, call, part, site)) WITHOUT ROWID;
CREATE TABLE unobserved (id INTEGER PRIMARY KEY, items BLOB NOT NULL UNIQUE);
CREATE TABLE run (id INTEGER PRIMARY KEY, condition TEXT NOT NULL, position INTEGER NOT NULL,
    process INTEGER NOT NULL, seconds REAL NOT NULL, calls INTEGER NOT NULL, base INTEGER,
    module BLOB NOT NULL, parent BLOB NOT NULL, args BLOB NOT NULL, state BLOB NOT NULL, out BLOB NOT NULL,
    flags BLOB NOT NULL, records TEXT NOT NULL, unobserved INTEGER NOT NULL);
"""

_CURES = {
    "SQLITE_FULL": "the disk is full; free some space, or write to another disk with --output",
    "SQLITE_IOERR": "the disk refused the write (full, over a quota or a limit, or failing); "
    "write to another disk with --output",
    "SQLITE_READONLY": "the file or its folder is read-only; write somewhere else with --output",
    "SQLITE_CANTOPEN": "it cannot be opened for writing; check the folder's permissions, or use --output",
    "SQLITE_PERM": "there is no permission; write somewhere else with --output",
    "SQLITE_BUSY": "another process keeps it locked; wait for that process to end, or use --output",
}
_UNDECODABLE = (ValueError, TypeError, LookupError, ArithmeticError, zlib.error)
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")


def captures_dir(path: str | Path) -> Path:
    """The folder for captured tensors, beside the trace: ``<trace>.d``. Not created here."""
    return Path(f"{path}.d")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the SQLite file in autocommit; ``mode`` is ``ro`` or ``rw`` (neither creates it)."""
    # Closing at the end of the interpreter may happen in another thread, hence no check of threads.
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def check_file(path: Path) -> None:
    """Refuse what SQLite should not be asked to open (it would wait for a pipe's other end).

    Raises:
        TraceUnreadable: missing, a folder, or no ordinary file.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TraceUnreadable(f"{path} does not exist; check the path") from error
    except ValueError as error:
        raise TraceUnreadable(f"{str(path)!r} is no file name ({error}); check the path") from error
    except OSError as error:
        raise TraceUnreadable(f"{path} cannot be read: {error.strerror}; check the path") from error
    if stat.S_ISDIR(mode):
        raise TraceUnreadable(f"{path} is a folder; give the *.detaudit file itself")
    if not stat.S_ISREG(mode):
        raise TraceUnreadable(f"{path} is not a file; give the *.detaudit file that `detaudit run` wrote")


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is not a whole trace of a known version.

    A file that was cut short is told by its size: SQLite's header knows the number of pages, and the read
    transaction keeps a writer from changing either meanwhile.

    Raises:
        TraceUnreadable: not a trace, or truncated. TraceVersion: a version this detaudit does not know.
    """
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    application_id, version, pages, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "page_count", "page_size")
    )
    size = _main_file(connection, path).stat().st_size
    connection.execute("COMMIT")
    if size == 0:
        raise TraceUnreadable(f"{path} is empty: its recording ended before the first run; record it again")
    if application_id != APPLICATION_ID:
        raise TraceUnreadable(f"{path} is an SQLite file, but not a detaudit trace; check the name")
    if version != VERSION:
        raise TraceVersion(
            f"{path} has trace format version {version}, this detaudit reads version {VERSION}; "
            f"{'upgrade detaudit' if version > VERSION else 'record it again'}"
        )
    whole = pages * page_bytes
    if size < whole:
        raise TraceUnreadable(
            f"{path} is truncated ({size:,} of {whole:,} bytes); copy it again, or record it again"
        )


def _main_file(connection: sqlite3.Connection, path: Path) -> Path:
    # As bytes: a path need not be UTF-8.
    (opened,) = connection.execute("SELECT CAST(file AS BLOB) FROM pragma_database_list LIMIT 1").fetchone()
    return Path(os.fsdecode(opened)) if opened else path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what damage and the file system raise, also while rows are decoded, into ``TraceUnreadable``."""
    try:
        yield
    except DetauditError:
        raise
    except sqlite3.Error as error:
        raise TraceUnreadable(_unreadable(path, error)) from error
    except OSError as error:
        raise TraceUnreadable(f"{path} cannot be read: {error.strerror or error}; check the path") from error
    except _UNDECODABLE as error:
        raise TraceUnreadable(
            f"{path} is damaged ({type(error).__name__}); copy it again, or record it again"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into ``TraceNotWritten``, and damage into ``TraceUnreadable``."""
    try:
        yield
    except sqlite3.Error as error:
        name = _error_name(error)
        if name.startswith(_DAMAGE):
            raise TraceUnreadable(_unreadable(path, error)) from error
        cure = next((cure for prefix, cure in _CURES.items() if name.startswith(prefix)), None)
        raise TraceNotWritten(f"cannot write the trace {path}: {cure or error}") from error
    except OSError as error:
        raise TraceNotWritten(
            f"cannot write the trace {path}: {error.strerror or error}; write somewhere else with --output"
        ) from error


def _unreadable(path: Path, error: sqlite3.Error) -> str:
    name = _error_name(error)
    if name.startswith("SQLITE_NOTADB"):
        return f"{path} is not a detaudit trace; give the *.detaudit file that `detaudit run` wrote"
    if name.startswith("SQLITE_BUSY"):
        return f"{path} is locked by a process that is writing it; wait for that process to end"
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_READONLY")):
        return f"{path} cannot be read ({error}); check its permissions and the disk"
    return f"{path} is damaged ({' '.join(str(error).split())}); copy it again, or record it again"


def _error_name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""
