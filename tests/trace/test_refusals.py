"""Where a trace cannot be written: one clear line, nothing overwritten, earlier runs kept."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from detaudit.core.errors import TraceNotWritten, TraceUnreadable
from detaudit.core.recording import Run
from detaudit.trace import TraceWriter, captures_dir, open_trace
from tests.trace.crash_writer import make_run
from tests.trace.test_crash import ROOT, read_only_mount
from tests.trace.test_round_trip import read_run

BIG = 150
"""Calls of a run that takes about 60 KB."""


def assert_runs(path: Path, count: int, calls: int = 20) -> None:
    with open_trace(path) as trace:
        read = [read_run(trace, run) for run in trace.runs()]
    assert read == [make_run(index, calls) for index in range(count)]


@pytest.mark.parametrize("content", [b"", b"precious", b"SQLite format 3\0"])
def test_never_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceNotWritten, match="exists already"):
        TraceWriter.create(path)
    assert path.read_bytes() == content


def test_neither_a_link_nor_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for name in ("folder", "dangling"):
        with pytest.raises(TraceNotWritten, match="exists already"):
            TraceWriter.create(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_captured_tensors_of_another_trace_are_not_mixed_in(tmp_path: Path) -> None:
    captures_dir(tmp_path / "t").mkdir()
    with pytest.raises(TraceNotWritten, match=r"t\.d exists already"):
        TraceWriter.create(tmp_path / "t")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.d"]


def test_a_journal_left_by_a_deleted_trace_does_no_harm(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "old") as writer:
        writer.add_run(make_run(5))
    shutil.copyfile(tmp_path / "old", tmp_path / "t-journal")
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(make_run(0))
    assert_runs(tmp_path / "t", 1)


@pytest.mark.parametrize("name", ["missing/t", "file/t", "x" * 300, "a\0b"])
def test_impossible_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceNotWritten) as caught:
        TraceWriter.create(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "medium"
    folder.mkdir()
    with TraceWriter.create(folder / "t") as writer:
        writer.add_run(make_run(0))
    with read_only_mount(folder):
        with pytest.raises(TraceNotWritten, match="read-only"):
            TraceWriter.create(folder / "new")
        with pytest.raises(TraceNotWritten, match="read-only"):
            TraceWriter.append(folder / "t")
        assert_runs(folder / "t", 1)
    assert [entry.name for entry in folder.iterdir()] == ["t"]


NOBODY = 65534


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Permission bits do not stop root, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own cannot be."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_no_permission(open_folder: Path) -> None:
    path = open_folder / "t"
    with TraceWriter.create(path) as writer:
        writer.add_run(make_run(0))
    path.chmod(0o444)
    open_folder.chmod(0o555)
    with as_ordinary_user():
        with pytest.raises(TraceNotWritten, match="permission denied"):
            TraceWriter.create(open_folder / "new")
        with pytest.raises(TraceNotWritten, match="read-only"):
            TraceWriter.append(path)
        assert_runs(path, 1)
    path.chmod(0o000)
    with as_ordinary_user(), pytest.raises(TraceUnreadable, match="cannot be read"):
        open_trace(path)
    open_folder.chmod(0o755)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "t"
    with TraceWriter.create(path) as writer:
        written = fill(writer)
        assert 1 <= written < 100
        assert_runs(path, written, BIG)
        with pytest.raises(TraceNotWritten, match="disk is full"):
            writer.add_run(make_run(written, BIG))
    assert_runs(path, written, BIG)
    assert [entry.name for entry in small_disk.iterdir()] == ["t"]


def test_a_disk_that_was_full_and_is_not_any_more(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(200_000))
    with TraceWriter.create(small_disk / "t") as writer:
        written = fill(writer)
        ballast.unlink()
        writer.add_run(make_run(written, BIG))
    assert_runs(small_disk / "t", written + 1, BIG)


def test_a_disk_too_full_to_begin(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(500_000))
    with pytest.raises(TraceNotWritten, match="disk is full"):
        TraceWriter.create(small_disk / "t")
    assert [entry.name for entry in small_disk.iterdir()] == ["ballast"]


def fill(writer: TraceWriter) -> int:
    """Add runs until the disk is full; returns how many were written."""
    for index in range(100):
        try:
            writer.add_run(make_run(index, BIG))
        except TraceNotWritten as error:
            message = str(error)
            break
    else:
        pytest.fail("the disk never filled up")
    assert "disk is full" in message
    assert len(message.splitlines()) == 1
    return index


def test_a_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as batch systems set it: reported by the kernel as a failed write."""
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from detaudit.core.errors import TraceNotWritten
from detaudit.trace import TraceWriter
from tests.trace.crash_writer import make_run
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
with TraceWriter.create(Path({str(tmp_path / "t")!r})) as writer:
    try:
        for index in range(100):
            writer.add_run(make_run(index))
    except TraceNotWritten as error:
        print(index, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    written, _, message = done.stdout.strip().partition(" ")
    assert "cannot write the trace" in message
    assert int(written) > 0
    assert_runs(tmp_path / "t", int(written))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200_000


def test_an_error_of_the_caller_undoes_its_run_only(tmp_path: Path) -> None:
    broken = Run("in-process", 1, 0, make_run(1).calls, {"final": (("out", None),)})  # type: ignore[dict-item]
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(make_run(0))
        with pytest.raises(AttributeError):
            writer.add_run(broken)
        writer.add_run(make_run(1))
    assert_runs(tmp_path / "t", 2)


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = TraceWriter.create(tmp_path / "t")
    writer.close()
    writer.close()
    with pytest.raises(TraceNotWritten, match="closed"):
        writer.add_run(make_run(0))


def test_superseded_runs_are_relabelled(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        for index in range(3):
            writer.add_run(make_run(index))
        writer.add_run(Run("hooks-off", 3, 0, (), {}))
        writer.store_report({})
        writer.relabel_runs(("in-process",), "superseded")
    with open_trace(tmp_path / "t") as trace:
        assert [run.condition for run in trace.runs()] == ["superseded"] * 3 + ["hooks-off"]
        assert trace.report() is None
