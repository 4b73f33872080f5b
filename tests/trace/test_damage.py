"""What is not a whole trace is refused with one line; it is never read as a shorter one."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detaudit.core.errors import DetauditError, TraceUnreadable, TraceVersion
from detaudit.trace import TraceWriter, open_trace
from tests.trace.crash_writer import make_run
from tests.trace.test_round_trip import read_run

RUNS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "t"
    with TraceWriter.create(path, {"target": "x"}) as writer:
        for index in range(RUNS):
            writer.add_run(make_run(index))
        writer.store_report({"verdict": "nondeterministic"})
    return path


def read_everything(path: Path) -> int:
    with open_trace(path) as trace:
        assert trace.report() == {"verdict": "nondeterministic"}
        assert trace.meta == {"target": "x"}
        runs = [read_run(trace, run) for run in trace.runs()]
        assert runs == [make_run(index) for index in range(len(runs))]
        return len(runs)


def one_line(error: DetauditError, path: Path) -> None:
    """What is wrong, then what to do."""
    assert len(str(error).splitlines()) == 1
    assert str(error).startswith(str(path))
    assert "; " in str(error)


def test_cut_anywhere(tmp_path: Path, whole: Path) -> None:
    assert read_everything(whole) == RUNS
    path = tmp_path / "t"
    data = whole.read_bytes()
    for cut in {*range(1, len(data), 997), *range(1, 200), *range(4096, len(data), 4096), len(data) - 1}:
        path.write_bytes(data[:cut])
        with pytest.raises(TraceUnreadable) as caught, open_trace(path):
            pass
        one_line(caught.value, path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_overwritten_anywhere(tmp_path: Path, whole: Path, data: st.DataObject) -> None:
    """Zeroed or garbled pages: an error of ours or the right content, unless only a stored digest changed."""
    length = data.draw(st.sampled_from([1, 16, 512, 4096]))
    content = whole.read_bytes()
    start = data.draw(st.integers(0, len(content) - length))
    junk = data.draw(st.sampled_from([bytes(length), b"\xff" * length, bytes(range(256)) * 16]))[:length]
    path = tmp_path / "t"
    path.write_bytes(content[:start] + junk + content[start + length :])
    try:
        with open_trace(path) as trace:
            trace.report(), trace.meta, trace.modules, trace.flags
            assert len(trace.runs()) == RUNS
            for run in trace.runs():
                read_run(trace, run)
    except DetauditError as error:
        one_line(error, path)


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("not a trace\n" * 1000)
    with pytest.raises(TraceUnreadable, match="not a detaudit trace"):
        open_trace(path)
    assert path.read_text().startswith("not a trace")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.touch()
    with pytest.raises(TraceUnreadable, match="is empty"):
        open_trace(path)


def test_a_foreign_sqlite_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA user_version = 1; CREATE TABLE run (id INTEGER PRIMARY KEY);")
    connection.close()
    for opener in (open_trace, TraceWriter.append):
        with pytest.raises(TraceUnreadable, match="not a detaudit trace"):
            opener(path)


@pytest.mark.parametrize(
    ("version", "cure"), [(2, "upgrade detaudit"), (99, "upgrade detaudit"), (0, "record")]
)
def test_another_version_is_refused_by_name(tmp_path: Path, whole: Path, version: int, cure: str) -> None:
    path = tmp_path / "t"
    shutil.copyfile(whole, path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    for opener in (open_trace, TraceWriter.append):
        with pytest.raises(TraceVersion, match=f"version {version}.*{cure}") as caught:
            opener(path)
        one_line(caught.value, path)


@pytest.mark.parametrize("name", ["missing", "missing/too", "a\0b", "x" * 300])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    for opener in (open_trace, TraceWriter.append):
        with pytest.raises(TraceUnreadable) as caught:
            opener(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder(tmp_path: Path) -> None:
    for opener in (open_trace, TraceWriter.append):
        with pytest.raises(TraceUnreadable, match="is a folder"):
            opener(tmp_path)


def test_a_device_and_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(TraceUnreadable, match="not a file"):
            open_trace(path)


def test_a_row_that_is_missing(tmp_path: Path, whole: Path) -> None:
    for statement in ("DELETE FROM run WHERE id = 2", "DELETE FROM value WHERE id = 3", "DELETE FROM record"):
        path = tmp_path / "t"
        shutil.copyfile(whole, path)
        connection = sqlite3.connect(path)
        with connection:
            connection.execute(statement)
        connection.close()
        with pytest.raises(TraceUnreadable, match="damaged"):
            read_everything(path)


def test_a_garbled_report(tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "t"
    shutil.copyfile(whole, path)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE report SET body = ?", (json.dumps([1])[:-1],))
    connection.close()
    with open_trace(path) as trace, pytest.raises(TraceUnreadable, match="damaged"):
        trace.report()


def test_a_file_of_the_newest_sqlite_journal_mode(tmp_path: Path, whole: Path) -> None:
    """Someone switched the file to WAL with another tool: still one file, still readable."""
    path = tmp_path / "t"
    shutil.copyfile(whole, path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    assert read_everything(path) == RUNS
