from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from detaudit.core.errors import TraceNotWritten
from detaudit.core.files import write_bytes, write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "grün\n")
    assert path.read_bytes() == b"gr\xc3\xbcn\n"
    write_bytes(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_new_files_follow_the_umask_and_old_ones_keep_their_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o600)
    write_text(tmp_path / "new", "y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("stage", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, stage, fail)
    with pytest.raises(TraceNotWritten, match="the disk is full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_interruption_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "a", "new")
    assert list(tmp_path.iterdir()) == []


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, advice in [
        (tmp_path / "no" / "a", "the folder does not exist"),
        (tmp_path / "file" / "a", "is a file, not a folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / ("a" * 300), "too long"),
    ]:
        with pytest.raises(TraceNotWritten, match=advice) as caught:
            write_text(path, "x")
        assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_written_straight_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_text("/dev/null", "nowhere")
