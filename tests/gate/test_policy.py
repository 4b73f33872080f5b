"""The policy: what it may say, where it is looked for, and one clear line for everything else."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from detaudit.core.errors import PolicyInvalid
from detaudit.core.stats import upper_bound
from detaudit.gate.policy import Policy, find_policy, read_policy

FULL = """
runs = 60
bound = 0.05
conditions = ["in-process", "hooks-off"]
devices = ["cuda"]
time-budget = "20 min"
kernels = "confirmed"
lock = "locks/gpu.lock"
unknown-environment = "fail"
new-suspects = "report"

[[targets]]
path = "model.py"

[[targets]]
path = "serving/decode.py:build_small"
name = "decode"
runs = 300
bound = 0.01
script = false
args = ["--steps", "3"]
devices = ["H200"]

[[allow]]
module = "layers.*.mlp.experts"
reason = "issue 812"
expires = 2027-01-31
target = "decode"
"""
TODAY = date(2027, 1, 31)


def policy(folder: Path, text: str, name: str = "detaudit.toml", today: date = TODAY) -> Policy:
    path = folder / name
    path.write_text(text)
    return read_policy(path, today)


def test_everything_it_may_say(tmp_path: Path) -> None:
    found = policy(tmp_path, FULL)
    model, decode = found.targets
    assert (model.name, model.runs, model.bound, model.devices) == ("model.py", 60, 0.05, ("cuda",))
    assert (decode.name, decode.path) == ("decode", "serving/decode.py:build_small")
    assert (decode.runs, decode.bound, decode.devices) == (300, 0.01, ("H200",))
    assert (decode.conditions, decode.args) == (("in-process", "hooks-off"), ("--steps", "3"))
    assert (found.budget, found.kernels, found.unknown_environment) == (1200.0, "confirmed", "fail")
    assert (found.new_suspects, found.lock_path) == ("report", tmp_path / "locks/gpu.lock")
    (allowance,) = found.allowances
    assert allowance.covers("decode", "layers.3.mlp.experts")
    assert not allowance.covers("model.py", "layers.3.mlp.experts")
    assert not allowance.covers("decode", "layers.3.mlp")


def test_pyproject_says_the_same(tmp_path: Path) -> None:
    text = "[tool.detaudit]\n" + FULL.replace("[[", "[[tool.detaudit.")
    assert policy(tmp_path, text, "pyproject.toml").targets == policy(tmp_path, FULL).targets


def test_the_root_can_be_allowed_to_vary(tmp_path: Path) -> None:
    (allowance,) = policy(
        tmp_path, "[[allow]]\nmodule = '(root)'\nreason = 'x'\nexpires = 2999-01-01\n"
    ).allowances
    assert allowance.covers("model.py", "")
    assert not allowance.covers("model.py", "layers")


def test_it_is_looked_for_upwards(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.detaudit]\nruns = 7\n")
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n")
    assert find_policy(inner).defaults.runs == 7
    assert find_policy(inner).folder == tmp_path
    (tmp_path / "a" / "detaudit.toml").write_text("runs = 8\n")
    assert find_policy(inner).defaults.runs == 8


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ('"90s"', 90), ('"1.5h"', 5400), ('"2m"', 120)])
def test_times(text: str, seconds: float, tmp_path: Path) -> None:
    assert policy(tmp_path, f"time-budget = {text}\n").budget == seconds


def allow(**changes: str) -> str:
    values = {"module": '"x"', "reason": '"y"', "expires": "2027-01-31"} | changes
    return "[[allow]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs = 1\n", "runs is 1; expected an integer of at least 2"),
        ("runs = true\n", "runs is True"),
        ("bound = 0\n", "above 0"),
        ("bound = 1.5\n", "at most 1"),
        ("conditions = 'in-process'\n", "a list of strings"),
        ("targets = [3]\n", "tables with a 'path'"),
        ("targets = [{name = 'x'}]\n", "targets 1: 'path' is missing"),
        ("targets = [{path = 'x', run = 3}]\n", "targets 1: unknown key 'run'; did you mean 'runs'?"),
        ("targets = ['x', 'x']\n", "two targets are called 'x'"),
        ("targets = [{path = 'x', bound = 0.01}]\n", "set runs = 300"),
        ("time-budget = 'soon'\n", '"15min"'),
        ("time-budget = -3\n", "expected a time"),
        ("kernels = 'maybe'\n", '"shown" or "confirmed" or "ignore"'),
        ("zebra = 1\n", "unknown key 'zebra'; known keys: allow, bound"),
        ("allow = 3\n", "write [[allow]]"),
        (allow(expires='"soon"'), "allow 1: expires is 'soon'; expected a date"),
        (allow(reason='" "'), "empty reason"),
        (allow(until='"x"'), "unknown key 'until'"),
        ("targets = ['m.py']\n" + allow(target='"n.py"'), "'n.py', which is not among the targets (m.py)"),
        (allow(expires="2027-01-30"), "expired on 2027-01-30"),
    ],
)
def test_what_cannot_be_meant(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyInvalid) as caught:
        policy(tmp_path, text)
    assert words in str(caught.value)
    assert "detaudit.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_day_of_expiry_still_holds(tmp_path: Path) -> None:
    assert policy(tmp_path, allow(), today=date(2027, 1, 31)).allowances


def test_the_number_of_runs_it_advises_is_the_least_that_will_do(tmp_path: Path) -> None:
    with pytest.raises(PolicyInvalid, match="set runs = 60"):
        policy(tmp_path, "runs = 20\nbound = 0.05\n")
    assert upper_bound(59) <= 0.05 < upper_bound(58)
    assert policy(tmp_path, "runs = 60\nbound = 0.05\n").defaults.bound == 0.05


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(PolicyInvalid, match="no policy file"):
        read_policy(tmp_path / "gone.toml")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(PolicyInvalid, match=r"no \[tool.detaudit\]"):
        read_policy(tmp_path / "pyproject.toml")


def test_the_documented_policy_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    found = policy(tmp_path, example, "pyproject.toml", today=date(2026, 1, 1))
    assert [(target.name, target.runs) for target in found.targets] == [
        ("model.py", 60),
        ("serving/decode.py:build_small", 100),
    ]
    listed = page.split("| key | meaning | default |")[1].split("\n\n")[0]
    keys = re.findall(r"`([\w-]+)`", "\n".join(line.split("|")[1] for line in listed.splitlines() if line))
    with pytest.raises(PolicyInvalid) as caught:
        policy(tmp_path, "no-such-key = 1\n")
    known = str(caught.value).split("known keys: ")[1].split(", ")
    assert sorted(keys) == known
