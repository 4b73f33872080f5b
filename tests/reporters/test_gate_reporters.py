"""The gate's result in every format, names and messages chosen to break them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from detaudit.core.gating import (
    CHECK_NAMES,
    BaselineResult,
    Change,
    Check,
    EnvironmentChange,
    GateResult,
    Status,
    TargetResult,
)
from detaudit.reporters.gating import FORMATS, gate_reporter
from tests.golden.reports import nondeterministic

# The schema of the OASIS standard, SARIF 2.1.0 with errata 01; its "id" is where it is published.
SCHEMA = json.loads((Path(__file__).parents[1] / "gate" / "sarif-schema-2.1.0.json").read_text())
AWKWARD = "a|b <c> & \"d\" 'e' 100%\r\nnext\x1b[31m\x00 ]]> ✓ \U0001f600, f: g::h"
BASELINE = BaselineResult(
    "changed",
    "b938966ab816",
    "b938966ab816",
    False,
    Change("layers.0", "Layer", 0, "outputs", 3),
    (EnvironmentChange("gpu.driver", "570", "580"),),
    ("in-process",),
)


def result(*checks: Check, **target: Any) -> GateResult:
    values: dict[str, Any] = {
        "name": "model.py",
        "file": "models/model.py",
        "checks": checks,
        "seconds": 12.3456,
    }
    return GateResult((TargetResult(**{**values, **target}),), "pyproject.toml", "detaudit.lock")


def shown(format_: str, given: GateResult) -> str:
    stream = io.StringIO()
    gate_reporter(format_).render(given, stream)
    return stream.getvalue()


MODULES: dict[Status, str | None] = {
    "passed": None,
    "failed": "layers.0",
    "error": "",
    "inconclusive": AWKWARD,
}
EVERYTHING = result(
    *(Check(name, status, AWKWARD, module) for name in CHECK_NAMES for status, module in MODULES.items()),
    name=AWKWARD,
    file="a folder/ü 100%/m#1.py",
    notes=(AWKWARD,),
    report=nondeterministic(),
    baseline=BASELINE,
    trace="t.detaudit",
)


def test_sarif_is_valid_whatever_it_holds() -> None:
    log = json.loads(shown("sarif", EVERYTHING))
    jsonschema.validate(log, SCHEMA)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len(run["results"]) == 3 * (len(CHECK_NAMES) - 1)
    for found in run["results"]:
        assert rules[found["ruleIndex"]]["id"] == found["ruleId"]
        uri = found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert uri == "a%20folder/%C3%BC%20100%25/m%231.py"
    marks = [found["partialFingerprints"]["detaudit/v1"] for found in run["results"]]
    assert len(set(marks)) == len(marks)
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 3


def test_the_sarif_schema_can_refuse() -> None:
    log = json.loads(shown("sarif", EVERYTHING))
    log["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, SCHEMA)


def test_a_sarif_file_outside_the_repository_is_no_relative_path() -> None:
    log = json.loads(shown("sarif", result(Check("bound", "failed", "x"), file="/tmp/model.py")))
    jsonschema.validate(log, SCHEMA)
    location = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location == {"uri": "/tmp/model.py"}


def test_junit_is_xml_whatever_it_holds() -> None:
    text = shown("junit", EVERYTHING)
    root = ElementTree.fromstring(text.encode())
    cases = list(root.iter("testcase"))
    assert len(cases) == 4 * len(CHECK_NAMES)
    assert int(root.attrib["failures"]) == len(CHECK_NAMES)
    assert int(root.attrib["errors"]) == 2 * len(CHECK_NAMES)
    assert all(sum(e.tag in ("failure", "error") for e in case) <= 1 for case in cases)
    names = {p.attrib["name"]: p.attrib["value"] for p in root.iter("property")}
    assert names["baseline"] == "changed"
    assert float(root.attrib["time"]) == pytest.approx(12.346)
    failure = next(root.iter("failure"))
    assert "\U0001f600" in failure.attrib["message"]
    assert "\x00" not in text
    assert "\x1b" not in text


def unescaped(text: str) -> str:
    """As the runner of GitHub Actions reads a value of a command."""
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_annotations_are_one_line_each_and_read_back() -> None:
    lines = shown("github", result(Check("bound", "inconclusive", AWKWARD), name=AWKWARD)).splitlines()
    command = re.fullmatch(r"::warning file=([^,]*),line=1,title=([^,:]*)::(.*)", "\n".join(lines))
    assert command is not None
    assert unescaped(command[1]) == "models/model.py"
    assert unescaped(command[2]) == f"detaudit: {AWKWARD}: bound inconclusive"
    assert unescaped(command[3]) == AWKWARD


def test_more_annotations_than_github_shows_are_counted() -> None:
    lines = shown("github", EVERYTHING).split("\n")
    assert sum(line.startswith(("::error", "::warning")) for line in lines) == 10
    assert lines[-2] == f"::notice title=detaudit::{3 * len(CHECK_NAMES) - 10} more are in the step summary"
    assert shown("github", result(Check("evidence", "passed", "x"))) == ""


def test_markdown_keeps_its_table() -> None:
    lines = shown("markdown", EVERYTHING).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 * len(CHECK_NAMES) + 2
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_json_holds_everything() -> None:
    data = json.loads(shown("json", EVERYTHING))
    assert (data["format"], data["version"], data["status"], data["exit_code"]) == (
        "detaudit-gate",
        1,
        "failed",
        1,
    )
    (target,) = data["targets"]
    assert target["checks"][0]["message"] == AWKWARD
    assert target["baseline"]["change"]["module"] == "layers.0"
    assert target["report"] == nondeterministic().to_json()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 3),
        (("passed",), 0),
        (("passed", "inconclusive"), 3),
        (("inconclusive", "error"), 2),
        (("error", "failed", "inconclusive"), 1),
    ],
)
def test_the_worst_decides(statuses: tuple[Status, ...], code: int) -> None:
    assert result(*(Check("evidence", status, "") for status in statuses)).exit_code == code
    assert GateResult(()).exit_code == 3


def test_the_terminal() -> None:
    given = result(
        Check("evidence", "passed", "20 runs, 19 comparisons"),
        Check("baseline", "failed", "stable, but other bits than the baseline; first in layers.0"),
        notes=("an allowance was not needed",),
    )
    assert shown("terminal", given) == (
        "model.py  failed  12.3 s\n"
        "  evidence  passed  20 runs, 19 comparisons\n"
        "  baseline  failed  stable, but other bits than the baseline; first in layers.0\n"
        "  note              an allowance was not needed\n"
        "\n"
        "gate failed  (exit code 1)\n"
    )


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_shows_an_empty_result(format_: str) -> None:
    assert shown(format_, GateResult(()))
