"""A process that dies in run 7 leaves six runs that can be read, whatever it was doing."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from detaudit.core.errors import TraceUnreadable
from detaudit.trace import TraceWriter, open_trace
from detaudit.trace.schema import connect
from tests.trace.crash_writer import make_run
from tests.trace.test_round_trip import read_run

SCRIPT = Path(__file__).with_name("crash_writer.py")
ROOT = SCRIPT.parents[2]


def start(path: Path, mode: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, str(SCRIPT), str(path), mode]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(path: Path, mode: str, sent: signal.Signals) -> subprocess.Popen[str]:
    """Send the signal once the writer is in the middle of run 7."""
    process = start(path, mode)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "hanging\n":
            process.send_signal(sent)
    process.communicate(timeout=60)
    return process


def assert_six_runs(path: Path) -> None:
    with open_trace(path) as trace:
        assert [read_run(trace, run) for run in trace.runs()] == [make_run(index) for index in range(6)]
        assert trace.meta == {"target": "crash"}


@pytest.mark.parametrize("mode", ["wait", "commit", "spill"])
def test_kill_in_run_7(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "t.detaudit"
    process = end(path, mode, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "t.detaudit-journal").exists() == (mode != "wait")
    assert_six_runs(path)
    with open_trace(path) as trace:
        assert not trace.complete


def test_half_a_run_in_the_file_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "t.detaudit"
    end(path, "spill", signal.SIGKILL)
    # The control: SQLite itself cannot read the file as it lies there without changing it.
    with pytest.raises(sqlite3.OperationalError), closing(connect(path, "ro")) as connection:
        connection.execute("SELECT * FROM run")
    alone = tmp_path / "alone.detaudit"
    shutil.copyfile(path, alone)
    assert_six_runs(path)
    assert not (tmp_path / "t.detaudit-journal").exists()
    # Copied without its journal the file is not whole; that must be said.
    with pytest.raises(TraceUnreadable, match="damaged"), open_trace(alone) as trace:
        trace.runs()


@pytest.mark.parametrize("mode", ["wait", "commit"])
def test_interrupt_in_run_7(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "t.detaudit"
    process = end(path, mode, signal.SIGINT)
    assert process.returncode == -signal.SIGINT
    assert_six_runs(path)
    with open_trace(path) as trace:
        assert trace.complete
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.detaudit"]


@pytest.mark.parametrize(("mode", "status"), [("raise", 1), ("exit", 3)])
def test_interpreter_that_ends_closes_the_trace(tmp_path: Path, mode: str, status: int) -> None:
    path = tmp_path / "t.detaudit"
    process = start(path, mode)
    process.communicate(timeout=60)
    assert process.returncode == status
    assert_six_runs(path)
    with open_trace(path) as trace:
        assert trace.complete


def test_a_killed_trace_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "t.detaudit"
    end(path, "spill", signal.SIGKILL)
    with TraceWriter.append(path) as writer:
        assert writer.add_run(make_run(6)) == 6
    with open_trace(path) as trace:
        assert trace.run_count == 7
        assert not trace.complete


def test_killed_before_the_first_run_is_done(tmp_path: Path) -> None:
    path = tmp_path / "t.detaudit"
    with TraceWriter.create(path):
        pass
    with open_trace(path) as trace, pytest.raises(TraceUnreadable, match="no finished run"):
        trace.runs()


@contextmanager
def read_only_mount(folder: Path) -> Iterator[None]:
    """Make the folder a read-only medium, which stops root too."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a read-only file system needs root")
    bound = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, text=True)
    if bound.returncode:
        pytest.skip(f"bind mounts are not possible here: {bound.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("mode", ["wait", "spill"])
def test_a_killed_trace_on_a_read_only_medium(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "medium"
    folder.mkdir()
    end(folder / "t.detaudit", mode, signal.SIGKILL)
    with read_only_mount(folder):
        before = sorted(entry.name for entry in folder.iterdir())
        assert_six_runs(folder / "t.detaudit")
        assert sorted(entry.name for entry in folder.iterdir()) == before


def test_a_forked_child_leaves_the_parents_writer_alone(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(make_run(0))
        child = os.fork()
        if child == 0:
            writer.close()
            os._exit(0)
        os.waitpid(child, 0)
        writer.add_run(make_run(1))
    with open_trace(tmp_path / "t") as trace:
        assert trace.complete
        assert trace.run_count == 2
