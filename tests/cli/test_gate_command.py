"""``detaudit gate`` as a CI job meets it: a repository, its policy, the exit code, the files it reads."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import jsonschema
import pytest

from detaudit.gate.policy import TargetPolicy
from detaudit.gate.recording import Recorded
from tests.gate.repository import POLICY, Repository, one_line, record_here

SCHEMA = json.loads((Path(__file__).parents[1] / "gate" / "sarif-schema-2.1.0.json").read_text())
OUTPUTS = ("--json", "gate.json", "--junit", "gate.xml", "--sarif", "gate.sarif", "--markdown", "gate.md")
EXPERTS = "layers.0.mlp.experts"


def checks(repository: Repository, target: str) -> dict[str, str]:
    """Status by check of one target, from gate.json."""
    result = json.loads((repository.folder / "gate.json").read_text())
    (found,) = (t for t in result["targets"] if t["name"] == target)
    return {check["name"]: check["status"] for check in found["checks"]}


def sarif_results(repository: Repository) -> list[dict[str, Any]]:
    log = json.loads((repository.folder / "gate.sarif").read_text())
    jsonschema.validate(log, SCHEMA)
    (run,) = log["runs"]
    results: list[dict[str, Any]] = run["results"]
    return results


def junit(repository: Repository) -> dict[str, dict[str, str]]:
    """For each suite the outcome of each case; totals are checked against what is there."""
    root = ElementTree.parse(repository.folder / "gate.xml").getroot()
    cases = list(root.iter("testcase"))
    assert int(root.attrib["tests"]) == len(cases) > 0
    assert int(root.attrib["failures"]) == len(list(root.iter("failure")))
    assert int(root.attrib["errors"]) == len(list(root.iter("error")))
    found: dict[str, dict[str, str]] = {}
    for case in cases:
        outcome = next((e.tag for e in case if e.tag in ("failure", "error")), "passed")
        found.setdefault(case.attrib["classname"], {})[case.attrib["name"]] = outcome
    return found


def test_passes_and_regresses_against_the_baseline(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    updated = repository.gate("--update")
    assert updated.returncode == 0, updated.stdout + updated.stderr
    lock = (tmp_path / "detaudit.lock").read_text()

    passed = repository.gate(*OUTPUTS)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert checks(repository, "serving/experts.py")["baseline"] == "passed"
    assert set(junit(repository)) == {"head.py", "serving/experts.py"}
    assert sarif_results(repository) == []
    assert "gate passed" in passed.stdout
    assert repository.gate("--update").returncode == 0
    assert (tmp_path / "detaudit.lock").read_text() == lock

    repository.edit("head.py", "nn.Tanh()", "nn.Hardtanh()")
    changed = repository.gate(*OUTPUTS)
    assert changed.returncode == 1
    assert checks(repository, "head.py") == {
        "evidence": "passed",
        "determinism": "passed",
        "baseline": "failed",
    }
    assert checks(repository, "serving/experts.py")["baseline"] == "passed"
    (result,) = sarif_results(repository)
    assert (result["ruleId"], result["level"]) == ("detaudit/baseline", "error")
    words = "stable, but other bits than the baseline; first in 1 (Hardtanh), call 0"
    assert words in result["message"]["text"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "head.py"
    assert junit(repository)["head.py"]["baseline: 1"] == "failure"


def test_fails_on_a_race(tmp_path: Path, racy: None) -> None:
    repository = Repository(tmp_path, racing=(0,), policy=POLICY.replace("runs = 3", "runs = 6"))
    failed = repository.gate(*OUTPUTS, "--traces", "traces")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert checks(repository, "head.py")["determinism"] == "passed"
    assert checks(repository, "serving/experts.py")["determinism"] == "failed"
    assert "baseline" not in checks(repository, "serving/experts.py")
    assert junit(repository)["serving/experts.py"][f"determinism: {EXPERTS}"] == "failure"
    (result,) = sarif_results(repository)
    assert result["ruleId"] == "detaudit/determinism"
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == EXPERTS
    refused = repository.gate("--update", "traces/serving_experts.py.detaudit")
    assert refused.returncode == 1
    assert not (tmp_path / "detaudit.lock").exists()
    assert "detaudit.lock was not written" in refused.stdout


def test_an_allowance_lets_a_module_vary_until_a_day(tmp_path: Path, racy: None) -> None:
    allow = '[[tool.detaudit.allow]]\nmodule = "layers.*.experts"\nreason = "issue 12"\nexpires = '
    repository = Repository(tmp_path, racing=(0,), policy=POLICY + allow + f"{date.today()}\n")
    audited = ("run", "serving/experts.py", "--runs", "6", "--no-history", "--output", "t.detaudit")
    assert repository.detaudit(*audited).returncode == 1
    done = repository.gate("t.detaudit", "--json", "gate.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (target,) = json.loads((tmp_path / "gate.json").read_text())["targets"]
    assert target["report"]["verdict"] == "nondeterministic"
    assert "issue 12" in target["notes"][0]

    repository.edit("pyproject.toml", "layers.*.experts", "layers.1.*")
    assert repository.gate("t.detaudit").returncode == 1
    repository.edit("pyproject.toml", str(date.today()), str(date.today() - timedelta(days=1)))
    expired = repository.gate("t.detaudit")
    assert expired.returncode == 2
    assert "expired on" in one_line(expired)


def test_is_inconclusive_where_nothing_was_shown(tmp_path: Path) -> None:
    """The inputs of one target differ from run to run, so its runs cannot be compared."""
    repository = Repository(tmp_path)
    repository.edit("head.py", "torch.ones(2, 8)", "torch.full((2, 8), float(next(NUMBERS)))")
    repository.edit(
        "head.py", "import torch\n", "import itertools\nimport torch\nNUMBERS = itertools.count()\n"
    )
    done = repository.gate(*OUTPUTS)
    assert done.returncode == 3, done.stdout + done.stderr
    assert checks(repository, "head.py") == {"evidence": "inconclusive"}
    assert junit(repository)["head.py"] == {"evidence": "error"}
    (result,) = sarif_results(repository)
    assert (result["ruleId"], result["level"]) == ("detaudit/evidence", "warning")
    assert "the inputs differ" in result["message"]["text"]


def test_a_target_that_raises_is_an_error_of_that_target(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.edit("head.py", "torch.ones(2, 8)", "torch.ones(2, 9)")
    done = repository.gate(*OUTPUTS)
    assert done.returncode == 2
    assert checks(repository, "head.py") == {"audit": "error"}
    assert checks(repository, "serving/experts.py")["determinism"] == "passed"
    assert junit(repository)["head.py"] == {"audit": "error"}
    assert sarif_results(repository) == []
    invocation = json.loads((tmp_path / "gate.sarif").read_text())["runs"][0]["invocations"][0]
    assert invocation["executionSuccessful"] is False


def test_what_a_target_raised_is_shown(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.edit("head.py", "torch.ones(2, 8)", "torch.ones(2, 9)")
    done = repository.gate_process("head.py")
    assert done.returncode == 2
    assert 'head.py", line' not in done.stdout
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("docs/messages.md#target-raised]")
    words = "head.py raised while it ran (run 1): RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert words in " ".join(done.stdout.split())
    assert "messages.md" not in done.stdout


BAD = {
    "not toml": ("[tool.detaudit]\nruns = \n", "not valid TOML"),
    "unknown key": ("[tool.detaudit]\ntarget = ['head.py']\n", "did you mean 'targets'?"),
    "wrong type": ("[tool.detaudit]\nruns = 'many'\n", "expected an integer of at least 2"),
    "bound out of reach": ("[tool.detaudit]\nruns = 20\nbound = 0.01\n", "set runs = 300"),
    "no such target": ("[tool.detaudit]\ntargets = ['gone.py']\n", "gone.py"),
    "no targets": ("[tool.detaudit]\nruns = 3\n", "nothing to examine"),
    "no reason": (
        "[tool.detaudit]\n[[tool.detaudit.allow]]\nmodule = 'x'\nexpires = 2999-01-01\n",
        "'reason' is missing",
    ),
    "expired": (
        "[tool.detaudit]\ntargets = ['head.py']\n[[tool.detaudit.allow]]\nmodule = 'x'\nreason = 'y'\n"
        "expires = 2020-01-31\n",
        "expired on 2020-01-31",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_policy_is_one_line(name: str, tmp_path: Path) -> None:
    text, words = BAD[name]
    repository = Repository(tmp_path, policy=text)
    before = repository.files()
    done = repository.gate(*OUTPUTS)
    assert done.returncode == 2
    assert words in one_line(done)
    assert repository.files() == before


def test_an_allowance_for_an_unknown_module(tmp_path: Path) -> None:
    allow = '[[tool.detaudit.allow]]\nmodule = "layer.0"\nreason = "typo"\nexpires = 2999-01-01\n'
    repository = Repository(tmp_path, policy=POLICY.replace(', "serving/experts.py"', "") + allow)
    before = repository.files()
    done = repository.gate(*OUTPUTS)
    assert done.returncode == 2
    assert "'layer.0' names no module of head.py" in one_line(done)
    assert repository.files() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a detaudit lock file"),
        ('{"format": "detaudit-lock", "version": 7}', "version 7"),
        ('{"format": "detaudit-lock", "version": 1, "environments": {}}', "damaged"),
    ],
)
def test_a_broken_lock(text: str, words: str, tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.write("detaudit.lock", text)
    for arguments in (OUTPUTS, ("--update",)):
        done = repository.gate(*arguments)
        assert done.returncode == 2
        assert words in one_line(done)
    assert (tmp_path / "detaudit.lock").read_text() == text


@pytest.mark.parametrize("path", ["missing/gate.sarif", "serving", "head.py/gate.sarif"])
def test_an_output_that_cannot_be_written_is_known_before_the_audits(path: str, tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    before = repository.files()
    done = repository.gate("--junit", "gate.xml", "--sarif", path)
    assert done.returncode == 2
    assert path in one_line(done)
    assert repository.files() == before


def test_the_time_budget_ends_a_target_that_hangs(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\ntargets = ['head.py', 'serving/experts.py']\n")
    repository.edit("pyproject.toml", "targets", 'time-budget = "6s"\ntargets')
    repository.edit("head.py", "def make_inputs():", "import time\ndef make_inputs():\n    time.sleep(600)")
    done = repository.gate_process("--json", "gate.json")
    assert done.returncode == 3, done.stderr
    assert checks(repository, "head.py") == {"budget": "inconclusive"}
    assert checks(repository, "serving/experts.py") == {"budget": "inconclusive"}


def test_what_was_recorded_before_the_time_was_over_is_judged_and_no_pass(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 5\ntime-budget = '90s'\n")

    def cut_short(target: TargetPolicy, *arguments: Any, **options: Any) -> Recorded:
        return replace(record_here(replace(target, runs=2), *arguments, **options), cut=True)

    with mock.patch("detaudit.gate.gate.record", cut_short):
        done = repository.detaudit("gate", "head.py", "--json", "gate.json")
    assert done.returncode == 3, done.stderr
    assert checks(repository, "head.py") == {
        "evidence": "inconclusive",
        "determinism": "passed",
        "budget": "inconclusive",
    }
    assert "the time budget of 90 s ended after 2 of 5 runs" in done.stdout


def test_a_target_that_takes_its_process_down_takes_nothing_else(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\n")
    repository.edit("head.py", "return torch.ones(2, 8)", "import os\n    os.kill(os.getpid(), 11)")
    done = repository.gate_process("head.py", "--json", "gate.json")
    assert done.returncode == 2
    assert checks(repository, "head.py") == {"audit": "error"}
    assert "the audit ended with signal 11" in done.stdout


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_ending_the_gate_ends_the_audit_too(number: int, code: int, tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\n")
    pid = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    repository.edit("head.py", "return torch.ones(2, 8)", pid)
    process = repository.start("gate", "head.py", "--junit", "gate.xml")
    while not (tmp_path / "pid").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (code, "detaudit: interrupted\n")
    assert ended(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "gate.xml").exists()


def ended(pid: int) -> bool:
    """Whether a process ends within seconds; one that nobody waits for any more may stay as a zombie."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_in_github_actions(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\nconditions = ['cuda-graph']\n")
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    done = repository.gate("head.py", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 3
    assert (
        "::warning file=head.py,line=1,title=detaudit%3A head.py%3A conditions inconclusive::" in done.stdout
    )
    assert summary.read_text().startswith("before\n## ⚠️ detaudit gate inconclusive (exit code 3)\n")
    assert "::" not in repository.gate("head.py", "--no-github", GITHUB_ACTIONS="true").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "head.py"), "head.py would be written over"),
        (("head.py:build_model", "--json", "head.py"), "head.py would be written over"),
        (("--json", "r.json", "--junit", "r.json"), "r.json would be written over"),
        (("--json", "-", "--junit", "-"), "only one output can be -"),
    ],
)
def test_no_output_replaces_what_is_read_or_another(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\ntargets = ['head.py']\n")
    before = (tmp_path / "head.py").read_text()
    done = repository.gate(*arguments)
    assert (done.returncode, (tmp_path / "head.py").read_text()) == (2, before)
    assert message in done.stderr
