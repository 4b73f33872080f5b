"""Every reporter's output for one report of each kind, letter by letter."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from detaudit.commands import doctor
from detaudit.core.records import Report
from detaudit.doctor import diagnose
from detaudit.reporters import reporter
from detaudit.reporters.terminal import TerminalReporter
from tests.cli.machines import B200, H200, machine
from tests.golden.reports import ALL

Golden = Callable[[str, str], None]


def text_of(report: Report, format_: str) -> str:
    stream = io.StringIO()
    reporter(format_).render(report, stream)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _no_colour_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", ALL)
def test_terminal(name: str, golden: Golden) -> None:
    golden(f"terminal_{name}", text_of(ALL[name](), "terminal"))


@pytest.mark.parametrize("name", ALL)
def test_markdown(name: str, golden: Golden) -> None:
    golden(f"markdown_{name}", text_of(ALL[name](), "markdown"))


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminal(width: int, golden: Golden) -> None:
    stream = io.StringIO()
    TerminalReporter(width=width).render(ALL["nondeterministic"](), stream)
    golden(f"terminal_width_{width}", stream.getvalue())


@pytest.mark.parametrize("name", ALL)
def test_json_reads_back_as_the_same_report(name: str) -> None:
    report = ALL[name]()
    text = text_of(report, "json")
    assert Report.from_json(json.loads(text)).to_json() == report.to_json()
    assert json.loads(text)["exit_code"] == report.exit_code


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("format_", ["terminal", "markdown"])
def test_no_reporter_says_clean(name: str, format_: str) -> None:
    assert "clean" not in text_of(ALL[name](), format_).lower()


def test_lines_fit_the_width() -> None:
    text = text_of(ALL["nondeterministic"](), "terminal")
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_force_color_colours_and_no_color_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31m" in text_of(ALL["nondeterministic"](), "terminal")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in text_of(ALL["nondeterministic"](), "terminal")


@pytest.mark.parametrize("name", ["h200", "b200", "cpu"])
def test_doctor(name: str, golden: Golden) -> None:
    gpus = {"h200": [H200], "b200": [B200], "cpu": []}[name]
    stream = io.StringIO()
    doctor.render(diagnose(machine(*gpus)), stream)
    golden(f"doctor_{name}", stream.getvalue())
