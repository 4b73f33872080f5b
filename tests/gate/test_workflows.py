"""The documented GitHub Actions workflows: their shell, step by step, as the runner would execute it.

The programs that a step calls are stand-ins that note how they were called, except where the real gate runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gate.repository import ROOT, Repository

FOLDER = ROOT / "docs" / "ci"
WORKFLOWS = ("cpu.yml", "gpu.yml")
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash here")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def steps(name: str) -> list[dict[str, Any]]:
    (job,) = workflow(name)["jobs"].values()
    return list(job["steps"])


def script(name: str, step: str) -> str:
    (found,) = [s["run"] for s in steps(name) if s.get("name") == step]
    return str(found)


@dataclass
class Runner:
    """A checkout, a PATH of stand-ins, and the files through which steps speak with GitHub."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()

    def stand_in(self, program: str, body: str = "") -> None:
        path = self.folder / "bin" / program
        path.write_text(f'#!/bin/sh\necho "{program} $*" >> "$CALLS"\n{body}\n')
        path.chmod(0o755)

    def step(self, text: str, **env: str) -> subprocess.CompletedProcess[str]:
        """As GitHub runs a step of ``run`` without ``shell``: bash -e."""
        file = self.folder / "step.sh"
        file.write_text(text)
        given = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_PATH": str(self.folder / "path"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GITHUB_ACTIONS": "true",
            "HOME": str(self.folder),
        }
        assert BASH is not None
        return subprocess.run(
            [BASH, "-e", str(file)],
            cwd=self.folder,
            env={**given, **self.env, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def output(self) -> dict[str, str]:
        lines = (self.folder / "output").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_is_a_workflow(name: str) -> None:
    found = workflow(name)
    assert {"name", "permissions", "jobs"} <= set(found)
    assert found["permissions"]["contents"] == "read"
    (job,) = found["jobs"].values()
    assert job["timeout-minutes"] <= 60
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert "@" in step.get("uses", "@")
        # What comes from an event must reach the shell as a variable, never as text of the script.
        assert "${{" not in step.get("run", "")


def test_a_gpu_is_never_offered_to_pull_requests() -> None:
    # YAML 1.1 reads the key "on" as true.
    triggers = next(value for key, value in workflow("gpu.yml").items() if str(key) == "True")
    assert set(triggers) == {"push", "workflow_dispatch"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_step_is_valid_bash(name: str, runner: Runner) -> None:
    for step in steps(name):
        if "run" in step:
            assert BASH is not None
            done = subprocess.run([BASH, "-n"], input=step["run"], text=True, capture_output=True)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("code", [0, 1, 2, 3, 70, 137])
def test_the_verdict_is_the_gates_and_comes_after_the_reports(name: str, code: int, runner: Runner) -> None:
    result = "gate/gate.sarif" if name == "cpu.yml" else "gate/gate.json"
    runner.stand_in("detaudit", f"echo '{{}}' > {result}; exit {code}")
    gate = runner.step(script(name, "Gate"), UPDATE="false")
    assert gate.returncode == 0, gate.stderr
    assert "::error" not in gate.stdout
    assert runner.output() == {"code": str(code)}
    verdict = runner.step(script(name, "Verdict"), CODE=runner.output()["code"])
    assert verdict.returncode == (0 if code == 0 else 1)
    order = [step.get("name") for step in steps(name)]
    assert order[-1] == "Verdict"
    assert order.index("Gate") < len(order) - 2
    assert all("always()" in step["if"] for step in steps(name)[order.index("Gate") + 1 :])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_gate_that_wrote_nothing_is_no_pass(name: str, runner: Runner) -> None:
    runner.stand_in("detaudit", "exit 2")
    gate = runner.step(script(name, "Gate"), UPDATE="false")
    assert gate.returncode == 0
    assert "::error title=detaudit::the gate ended with 2 and wrote no result" in gate.stdout
    for lost in ({"CODE": ""}, {}):
        assert runner.step(script(name, "Verdict"), **lost).returncode == 1


def test_new_baselines_only_on_request(runner: Runner) -> None:
    runner.stand_in("detaudit", "echo '{}' > gate/gate.json; echo '{}' > detaudit.lock")
    for update in ("", "false"):
        runner.step(script("gpu.yml", "Gate"), UPDATE=update)
    assert not any("--update" in call for call in runner.calls())
    assert runner.step(script("gpu.yml", "Gate"), UPDATE="true").returncode == 0
    assert runner.calls()[-1].startswith("detaudit gate --update --traces gate/traces ")
    assert (runner.folder / "gate" / "detaudit.lock").exists()


def test_installation(runner: Runner) -> None:
    runner.stand_in("python")
    assert runner.step(script("cpu.yml", "Install")).returncode == 0
    assert runner.calls()[-1] == "python -m pip install detaudit"
    body = 'mkdir -p .venv/bin; ln -sf "$(dirname "$0")/python" .venv/bin/python'
    runner.stand_in("python3", body)
    assert runner.step(script("gpu.yml", "Install")).returncode == 0
    assert (runner.folder / "path").read_text() == f"{runner.folder}/.venv/bin\n"
    failing = 'case "$*" in *detaudit*) exit 1;; esac'
    runner.stand_in("python", failing)
    assert runner.step(script("cpu.yml", "Install")).returncode == 1


@pytest.mark.parametrize("busy", [0, 2])
def test_other_work_on_the_gpu_is_told(busy: int, runner: Runner) -> None:
    processes = "".join(f"echo {100 + n}; " for n in range(busy))
    runner.stand_in("nvidia-smi", f'case "$*" in *compute-apps*) {processes or ":"} ;; esac')
    done = runner.step(script("gpu.yml", "GPU"))
    assert done.returncode == 0, done.stderr
    assert ("::warning" in done.stdout) == (busy > 0)


def test_the_real_gate_in_the_cpu_workflow(runner: Runner) -> None:
    """The stand-in calls detaudit itself, in a repository with a policy."""
    Repository(runner.folder, policy="[tool.detaudit]\ntargets = ['head.py']\nruns = 2\nbound = 0.95\n")
    runner.stand_in("detaudit", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m detaudit "$@"')
    gate = runner.step(script("cpu.yml", "Gate"), OMP_NUM_THREADS="2")
    assert gate.returncode == 0, gate.stderr
    assert runner.output() == {"code": "0"}
    assert sorted(p.name for p in (runner.folder / "gate").iterdir()) == [
        "gate.json",
        "gate.sarif",
        "gate.xml",
        "traces",
    ]
    assert "detaudit gate passed" in (runner.folder / "summary").read_text()
    assert runner.step(script("cpu.yml", "Verdict"), CODE="0").returncode == 0
