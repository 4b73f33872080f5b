"""``detaudit report`` on traces with and without a stored analysis, and on files that are not traces."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from detaudit import cli
from detaudit.core.geometry import root_of
from detaudit.core.recording import Call, Run, Value
from detaudit.core.records import Report
from detaudit.trace import TraceWriter
from tests.cli.programs import detaudit, python
from tests.golden.reports import ALL, deterministic, nondeterministic


def stored(folder: Path, report: Report) -> Path:
    path = folder / "moe.detaudit"
    with TraceWriter.create(path, {"target": report.target}) as writer:
        writer.store_report(report.to_json())
    return path


@pytest.mark.parametrize("name", ALL)
def test_shows_what_was_stored(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ALL[name]()
    assert cli.run(["report", str(stored(tmp_path, report))]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == f"{report.verdict}  (exit code {report.exit_code})"
    assert shown.err == ""


@pytest.mark.parametrize("name", ALL)
def test_exit_code_on_request(name: str, tmp_path: Path) -> None:
    report = ALL[name]()
    assert cli.run(["report", str(stored(tmp_path, report)), "--exit-code"]) == report.exit_code


def test_json_is_the_stored_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, nondeterministic())
    assert cli.run(["report", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == nondeterministic().to_json() | {"trace": str(path)}


def test_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = stored(tmp_path, deterministic()), tmp_path / "report.md"
    assert cli.run(["report", str(path), "--format", "markdown", "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"Wrote {output}\n")
    assert output.read_text().startswith("## ✅ deterministic (exit code 0)")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moe.detaudit", "report.md"]


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "missing" / "report.json"
    assert cli.run(["report", str(stored(tmp_path, deterministic())), "--output", str(output)]) == 2
    assert "the folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "slug"),
    [(None, "trace-unreadable"), (b"", "trace-unreadable"), (b"not a database at all", "trace-unreadable")],
)
def test_what_is_not_a_trace(
    content: bytes | None, slug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.detaudit"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"[{slug}," in line
    assert "x.detaudit" in line


def test_truncated_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, nondeterministic())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert cli.run(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "[trace-unreadable," in line


def test_report_of_a_later_version_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.detaudit"
    with TraceWriter.create(path, {}) as writer:
        writer.store_report(deterministic().to_json() | {"version": 99})
    assert cli.run(["report", str(path)]) == 2
    assert "version 99" in capsys.readouterr().err


def test_a_stored_report_is_shown_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from detaudit import cli; code = cli.run(['report', sys.argv[1]])\n"
        "assert not {'torch', 'numpy', 'detaudit.compare'} & set(sys.modules); sys.exit(code)"
    )
    done = python(code, stored(tmp_path, nondeterministic()))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


def value(content: bytes) -> Value:
    return Value(root_of("uint8", (len(content),), content), "uint8", (len(content),), None, content)


def one_run(position: int, output: bytes) -> Run:
    """A root that calls ``experts``; the same input each time."""
    given, out = (("args[0]", value(b"input")),), (("out", value(output)),)
    calls = [Call("", "Net", 0, -1, given, (), out), Call("experts", "Experts", 0, 0, given, (), out)]
    return Run("in-process", position, 0, calls, {"inputs": given, "final": out})


def test_a_trace_without_an_analysis_is_analysed_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "killed.detaudit"
    with TraceWriter.create(path, {"target": "net.py"}) as writer:
        for position, output in enumerate((b"aaaaaaaa", b"aaaaaaab", b"aaaaaaaa")):
            writer.add_run(one_run(position, output))
    assert cli.run(["report", str(path), "--exit-code"]) == 1
    shown = capsys.readouterr()
    assert "killed.detaudit holds no analysis" in shown.err
    assert "experts (Experts), call 0: 1 of 2 runs differ" in shown.out


def test_a_trace_of_one_run_is_inconclusive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.detaudit"
    with TraceWriter.create(path, {"target": "net.py"}) as writer:
        writer.add_run(one_run(0, b"aaaaaaaa"))
    assert cli.run(["report", str(path), "--exit-code"]) == 3
    assert "nothing was compared: 1 run, so nothing was shown" in capsys.readouterr().out


def test_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path = stored(tmp_path, deterministic())
    closed = tmp_path / "closed"
    closed.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    done = detaudit("report", path, "--output", closed / "r.json")
    assert done.returncode == 2
    assert "permission denied" in done.stderr
