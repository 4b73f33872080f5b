"""``detaudit compare`` on traces of real audits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from detaudit.trace import TraceWriter
from tests.gate.repository import Repository, one_line


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path, policy="[tool.detaudit]\nruns = 3\n")


def record(repository: Repository, trace: str, **env: str) -> None:
    done = repository.detaudit("run", "head.py", "--runs", "3", "--output", trace, **env)
    assert done.returncode in (0, 1), done.stderr
    repository.forget()


def test_the_same_bits_on_a_machine_with_other_settings(repository: Repository) -> None:
    record(repository, "a.detaudit")
    record(repository, "b.detaudit", TRITON_INTERPRET="1")
    done = repository.detaudit("compare", "a.detaudit", "b.detaudit", "--json", "c.json")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("equal  (exit code 0)\nthe same bits in 4 calls")
    assert "variables.TRITON_INTERPRET: absent -> 1" in done.stdout
    found = json.loads((repository.folder / "c.json").read_text())
    assert (found["format"], found["version"], found["outcome"]) == ("detaudit-comparison", 1, "equal")
    piped = repository.detaudit("compare", "a.detaudit", "b.detaudit", "--json", "-")
    assert json.loads(piped.stdout) == found
    assert piped.stderr.startswith("equal  (exit code 0)\nthe same bits in 4 calls")
    assert not (repository.folder / "-").exists()


def test_the_module_that_was_changed(repository: Repository) -> None:
    record(repository, "a.detaudit")
    repository.edit("head.py", "nn.Tanh()", "nn.Hardtanh()")
    record(repository, "b.detaudit")
    done = repository.detaudit("compare", "a.detaudit", "b.detaudit")
    assert done.returncode == 1
    assert "First difference\n  1 (Hardtanh), call 0: other outputs for equal inputs" in done.stdout
    assert "out float32[2, 8], rows 0-1 of 2, up to" in done.stdout
    loose = repository.detaudit("compare", "a.detaudit", "b.detaudit", "--rel", "10")
    assert loose.returncode == 0
    assert loose.stdout.startswith("within tolerance")
    assert "equal  (exit" not in loose.stdout


def test_other_weights(repository: Repository) -> None:
    record(repository, "a.detaudit")
    repository.edit("head.py", "manual_seed(0)", "manual_seed(1)")
    record(repository, "b.detaudit")
    done = repository.detaudit("compare", "a.detaudit", "b.detaudit")
    assert done.returncode == 1
    words = "0 (Linear), call 0: other outputs for equal inputs, and its parameters are other ones"
    assert words in done.stdout
    assert "0.bias, 0.weight, 2.bias, 2.weight" in done.stdout


def test_what_cannot_be_compared(repository: Repository) -> None:
    record(repository, "a.detaudit")
    repository.write("text.detaudit", "not a trace")
    for arguments in (("a.detaudit", "missing.detaudit"), ("text.detaudit", "a.detaudit")):
        done = repository.detaudit("compare", *arguments, "--json", "c.json")
        assert done.returncode == 2
        assert arguments[0 if "text" in arguments[0] else 1] in one_line(done)
    with TraceWriter.create(repository.folder / "empty.detaudit"):
        pass
    empty = repository.detaudit("compare", "a.detaudit", "empty.detaudit", "--json", "c.json")
    assert empty.returncode == 2
    assert "no finished run" in one_line(empty)
    assert not (repository.folder / "c.json").exists()
    unwritable = repository.detaudit("compare", "a.detaudit", "a.detaudit", "--json", "no/such/c.json")
    assert unwritable.returncode == 2
    assert "no/such/c.json" in one_line(unwritable)
