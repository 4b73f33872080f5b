"""What is examined: targets by name or by file, and traces, matched with the policy and the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from detaudit.core.errors import TargetNotFound, TraceUnreadable, UsageError
from detaudit.gate.policy import Policy, find_policy
from detaudit.gate.subjects import Subject, subjects
from detaudit.trace import TraceWriter

POLICY = """
[tool.detaudit]
runs = 7
targets = ["head.py", { path = "serving/experts.py:build_small", name = "small", runs = 9 }]
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.chdir(tmp_path)
    Path("serving").mkdir()
    for name in ("head.py", "serving/experts.py", "other.py"):
        Path(name).write_text("")
    Path("pyproject.toml").write_text(POLICY)
    return find_policy(tmp_path)


def one(argument: str, policy: Policy) -> Subject:
    (found,) = subjects([argument], policy)
    return found


def test_all_targets_of_the_policy(policy: Policy, tmp_path: Path) -> None:
    head, small = subjects([], policy)
    assert (head.target.name, head.path, head.file) == ("head.py", str(tmp_path / "head.py"), "head.py")
    assert small.path == f"{tmp_path}/serving/experts.py:build_small"
    assert (small.target.name, small.file) == ("small", "serving/experts.py")


@pytest.mark.parametrize(
    "argument", ["small", "serving/experts.py:build_small", "./serving/experts.py:build_small"]
)
def test_a_target_is_known_by_its_name_and_by_its_file(argument: str, policy: Policy) -> None:
    assert (one(argument, policy).target.name, one(argument, policy).target.runs) == ("small", 9)


def test_from_another_folder(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("serving")
    found = one("experts.py:build_small", policy)
    assert (found.target.name, found.file, found.path) == ("small", "experts.py", "experts.py:build_small")
    assert one("../head.py", policy).target.name == "head.py"


def test_a_file_that_the_policy_does_not_name_has_its_defaults(policy: Policy) -> None:
    found = one("serving/experts.py", policy)
    assert (found.target.name, found.target.runs) == ("serving/experts.py", 7)


def test_a_trace_belongs_to_the_target_of_its_file_name(policy: Policy) -> None:
    for target, name, runs in (("experts.py:build_small", "small", 9), ("elsewhere.py", "elsewhere.py", 7)):
        Path("t.detaudit").unlink(missing_ok=True)
        with TraceWriter.create("t.detaudit", {"target": target}):
            pass
        found = one("t.detaudit", policy)
        assert (found.target.name, found.target.runs, found.trace) == (name, runs, Path("t.detaudit"))
    Path("t.detaudit").rename("renamed")
    assert one("renamed", policy).trace == Path("renamed")


def test_what_is_not_there(policy: Policy, tmp_path: Path) -> None:
    for argument, error in (
        ("gone.py", TargetNotFound),
        ("serving", TargetNotFound),
        ("gone.detaudit", TraceUnreadable),
    ):
        with pytest.raises(error, match=argument):
            subjects([argument], policy)
    with pytest.raises(UsageError, match=r"'head\.py' is to be examined twice"):
        subjects(["head.py", "./head.py"], policy)
    with pytest.raises(UsageError, match="nothing to examine"):
        subjects([], Policy(None, tmp_path))
    assert subjects([], Policy(None, tmp_path), optional=True) == []
    (tmp_path / "head.py").unlink()
    with pytest.raises(TargetNotFound, match=r"lists the target 'head\.py'"):
        subjects([], policy)
