"""Every way a command can end, and the exit code of each."""

from __future__ import annotations

import errno
import importlib
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from detaudit import cli
from detaudit.core import errors
from tests.cli.programs import ROOT, detaudit, environment, python

Behave = Callable[[Callable[[], object]], None]


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Behave:
    """Make ``detaudit report`` do what the test says."""

    def install(action: Callable[[], object]) -> None:
        command = click.Command("report", callback=action)
        module = types.SimpleNamespace(command=command)
        monkeypatch.setattr(importlib, "import_module", lambda _name: module)

    return install


def raiser(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_command_returns_its_code(behave: Behave, code: int) -> None:
    behave(lambda: code)
    assert cli.run(["report"]) == code


def test_a_command_that_returns_nothing_is_zero(behave: Behave) -> None:
    behave(lambda: None)
    assert cli.run(["report"]) == 0


def _subclasses(cls: type[errors.DetauditError]) -> list[type[errors.DetauditError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in _subclasses(sub))]


@pytest.mark.parametrize("kind", _subclasses(errors.DetauditError))
def test_our_errors_are_one_line_with_their_slug(
    behave: Behave, capsys: pytest.CaptureFixture[str], kind: type[errors.DetauditError]
) -> None:
    behave(raiser(kind("no such\nfile; give another")))
    assert cli.run(["report"]) == kind.exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (
        shown.err
        == f"detaudit: no such file; give another  [{kind.slug}, see docs/messages.md#{kind.slug}]\n"
    )


def test_a_target_that_raised_shows_its_frames_first(
    behave: Behave, capsys: pytest.CaptureFixture[str]
) -> None:
    behave(raiser(errors.TargetRaised("ValueError: bad", '  File "model.py", line 3, in f')))
    assert cli.run(["report"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == '  File "model.py", line 3, in f'
    assert second.startswith("detaudit: ValueError: bad  [target-raised")


@pytest.mark.parametrize(
    ("error", "code", "slug"),
    [
        (RuntimeError("oops"), 70, "internal"),
        (AssertionError(), 70, "internal"),
        (BrokenPipeError(errno.EPIPE, "a worker's pipe"), 70, "internal"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "not-written"),
        (SystemExit(0), 2, "target-raised"),
        (SystemExit(1), 2, "target-raised"),
        (click.ClickException("bad"), 2, "usage"),
        (click.FileError("x"), 2, "usage"),
    ],
)
def test_other_exceptions(
    behave: Behave, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, slug: str
) -> None:
    behave(raiser(error))
    assert cli.run(["report"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("detaudit: ")
    assert line.endswith(f"[{slug}, see docs/messages.md#{slug}]")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupted(behave: Behave, capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    behave(raiser(error))
    assert cli.run(["report"]) == 130
    assert capsys.readouterr().err == "detaudit: interrupted\n"


@pytest.mark.parametrize("arguments", [["--traceback", "report"], ["report", "--traceback"]])
def test_traceback_only_when_asked(
    behave: Behave, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    behave(raiser(RuntimeError("oops")))
    assert cli.run(["report"]) == 70
    assert "Traceback" not in capsys.readouterr().err
    assert cli.run(arguments) == 70
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "in action" in shown
    assert shown.splitlines()[-1].startswith("detaudit: internal error: RuntimeError: oops")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["report"], "Missing argument 'TRACE'"),
        (["report", "x", "--format", "pdf"], "'pdf' is not one of"),
        (["--nonsense"], "No such option"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "--help'.  [usage, see docs/messages.md#usage]" in line


def test_no_arguments_shows_the_help_and_is_not_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Usage: detaudit" in capsys.readouterr().err


def test_reader_that_goes_away_is_141_and_quiet() -> None:
    # More than a pipe holds, so that the write fails while the command runs ...
    code = (
        "import sys, click; from detaudit import cli\n"
        "def work(): click.echo('y\\n' * 10**6)\n"
        "cli.LazyGroup.get_command = lambda *a: click.Command('x', callback=work)\n"
        "sys.argv = ['detaudit', 'x']; cli.main()"
    )
    command = f'"{sys.executable}" -c "$CODE" | head -1; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment(CODE=code),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "y\n", "")


def test_reader_that_is_gone_before_the_first_byte_is_141_and_quiet() -> None:
    # ... and less than a buffer, so that only the last flush fails.
    command = f'(sleep 1; "{sys.executable}" -m detaudit --help) | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_full_disk_behind_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = detaudit("--help", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "detaudit: cannot write the output: No space left on device; free some space  [not-written"
    )
    assert len(done.stderr.splitlines()) == 1


def test_closed_stdout_gives_its_descriptor_to_nobody(tmp_path: Path) -> None:
    code = (
        "import sys; from detaudit import cli; cli._prepare_streams()\n"
        f"file = open({str(tmp_path / 'f')!r}, 'w'); sys.exit(file.fileno())"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$CODE" >&- <&-'],
        cwd=ROOT,
        env=environment(CODE=code),
        timeout=60,
    )
    assert done.returncode > 2


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_real_process(number: int, expected: int) -> None:
    code = (
        "import sys, time, click; from detaudit import cli\n"
        "def work(): print('ready', flush=True); time.sleep(60)\n"
        "cli.LazyGroup.get_command = lambda *a: click.Command('x', callback=work)\n"
        "sys.argv = ['detaudit', 'x']; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (expected, "detaudit: interrupted\n")


def test_ascii_terminal_can_show_everything() -> None:
    code = "import sys; from detaudit import cli; cli._prepare_streams(); print('\\u251c\\udcff')"
    done = python(code, env=environment(PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0"))
    assert (done.returncode, done.stdout) == (0, "\\u251c\\udcff\n")
