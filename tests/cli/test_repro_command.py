"""``detaudit repro`` as a program: what it says, what it refuses, and that nothing half-written stays."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import detaudit as api
from detaudit.core.records import Report
from detaudit.kernels.cases import Case
from detaudit.trace import TraceWriter, open_trace
from tests.cli.programs import detaudit
from tests.support import HIDDEN, TOKENS, combine_racing, threads

RACE = "torch.ops:aten.index_put_.default"


def race_case() -> Case:
    """One call of the operator that races, as an audit keeps it."""
    tensors = {
        "args[0]": torch.zeros(TOKENS, 64),
        "args[1][0]": torch.randperm(8 * TOKENS) % TOKENS,
        "args[2]": torch.randn(8 * TOKENS, 64),
    }
    arguments = [{"tensor": "args[0]"}, [{"tensor": "args[1][0]"}], {"tensor": "args[2]"}, True]
    parameters = {"args": arguments, "kwargs": {}, "written": ["args[0]"]}
    return Case("experts#0", RACE, tensors, parameters, "experts", 0, {"device": "cpu", "threads": 4})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A nondeterministic report with the origins ``gate`` and ``experts``, made up from a stable one."""
    from detaudit.core.records import Origin

    stable = api.audit(torch.nn.Linear(2, 2), torch.ones(1, 2), runs=2)
    origins = [Origin(name, "Cls", 0, "module", None, ("out",), 1) for name in ("gate", "experts")]
    return dataclasses.replace(stable, verdict="nondeterministic", origins=tuple(origins), runs_differing=1)


def write(folder: Path, report: Report | None, case: Case | None = None, **meta: object) -> Path:
    trace = folder / "t.detaudit"
    with TraceWriter.create(trace, {"target": "t.py", **meta}) as writer:
        if report is not None:
            writer.store_report(report.to_json())
    if case is not None:
        case.save(Path(f"{trace}.d") / f"operator-{case.name}")
    return trace


def refused(folder: Path, *arguments: str | Path, code: int = 2) -> str:
    """The one line, having checked that there is only one and that nothing was left in ``folder``."""
    before = sorted(folder.rglob("*"))
    done = detaudit("repro", *arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("detaudit: ")
    assert sorted(folder.rglob("*")) == before
    return done.stderr


@pytest.mark.usefixtures("racy")
def test_the_folder_and_what_is_said(tmp_path: Path, report: Report) -> None:
    trace = write(tmp_path, report, race_case())
    done = detaudit("repro", trace, "--output", tmp_path / "deep" / "bug")
    assert done.returncode == 0, done.stderr
    first, measured, wrote, *commands = done.stdout.splitlines()
    assert first == "experts differs alone, too:"
    assert "as captured: " in measured
    assert wrote == f"Wrote {tmp_path}/deep/bug: repro.py, its inputs, environment.json, REPORT.md"
    assert [command.split("&& ")[1].split("    ")[0] for command in commands] == [
        "python repro.py", "python repro.py --deterministic"
    ]  # fmt: skip
    assert len(list((tmp_path / "deep" / "bug").iterdir())) == 5
    again = refused(tmp_path, trace, "--output", tmp_path / "deep" / "bug")
    assert "exists already and is not overwritten" in again
    assert "[not-written" in again


def test_an_origin_that_is_none_or_has_no_call(tmp_path: Path, report: Report) -> None:
    reason = "the arguments of aten.x hold 9 bytes and 4 may be kept; raise --capture-bytes"
    trace = write(tmp_path, report, race_case(), not_captured={"gate": reason})
    line = refused(tmp_path, trace, "--origin", "nowhere")
    assert f"'nowhere' is no origin in {trace}; choose one of: gate, experts" in line
    assert "[usage" in line
    line = refused(tmp_path, trace, "--origin", "gate")
    assert f"{trace} holds no captured call of gate ({reason})" in line
    assert "[no-case" in line


def test_a_trace_without_a_captured_call(tmp_path: Path, report: Report) -> None:
    line = refused(tmp_path, write(tmp_path, report), "--output", tmp_path / "bug")
    assert "holds no captured call of gate, experts; 'detaudit run' captures one" in line
    assert "[no-case, see docs/messages.md#no-case]" in line


def test_a_verdict_with_nothing_to_reproduce(tmp_path: Path, report: Report) -> None:
    stable = dataclasses.replace(report, verdict="deterministic", origins=(), runs_differing=0)
    assert "its verdict is deterministic" in refused(tmp_path, write(tmp_path, stable))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert "did not finish" in refused(tmp_path, write(tmp_path, None))


def made_up(entry: str, *arguments: object, context: dict[str, object]) -> Case:
    """A captured call in ``experts`` of one tensor of ones and further arguments."""
    parameters = {"args": [{"tensor": "args[0]"}, *arguments], "kwargs": {}, "written": []}
    return Case("experts#0", entry, {"args[0]": torch.ones(4)}, parameters, "experts", 0, context)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            made_up("torch.ops:aten.add.Tensor", 1, context={"device": "cpu", "threads": 4}),
            "did not differ when run alone, nothing was written: as captured: 0 of 100 runs differ",
        ),
        (
            made_up("torch.ops:aten.add.Tensor", 1, context={"device": "cpu", "threads": 1}),
            "cannot differ when run alone here, nothing was written: The positive control could not run",
        ),
        (
            made_up("torch.ops:aten.add.Tensor", "no number", context={"device": "cpu", "threads": 4}),
            "could not be run alone (exit status 70), nothing was written: Cast error",
        ),
    ],
)
def test_a_call_that_does_not_differ_alone_is_not_written(
    tmp_path: Path, report: Report, call: Case, line: str
) -> None:
    trace = write(tmp_path, report, call)
    said = refused(tmp_path, trace, "--output", tmp_path / "deep" / "er" / "bug", code=3)
    assert f"the captured call of experts {line}" in said
    assert "[not-reproduced" in said


def test_a_damaged_call(tmp_path: Path, report: Report) -> None:
    trace = write(tmp_path, report, race_case())
    tensors = tmp_path / "t.detaudit.d" / "operator-experts#0" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-8])
    assert "[case-unreadable" in refused(tmp_path, trace, "--output", tmp_path / "bug")


def test_where_it_cannot_be_written(tmp_path: Path, report: Report) -> None:
    trace = write(tmp_path, report, race_case())
    (tmp_path / "file").write_text("")
    line = refused(tmp_path, trace, "--output", tmp_path / "file" / "bug")
    assert "[not-written" in line
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        assert "permission denied" in refused(tmp_path, trace, "--output", tmp_path / "closed" / "bug")


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "[trace-unreadable" in refused(tmp_path, tmp_path / "notes.txt")
    assert "[trace-unreadable" in refused(tmp_path, tmp_path / "absent.detaudit")
    assert detaudit("repro").returncode == 2
    assert detaudit("repro", tmp_path / "x", "--minimize", "--seconds", "0").returncode == 2


@pytest.mark.usefixtures("racy")
def test_an_audit_leaves_what_repro_needs(tmp_path: Path) -> None:
    with threads(4):
        rows, tokens = torch.randn(8 * TOKENS, HIDDEN), torch.randperm(8 * TOKENS) % TOKENS
        trace = tmp_path / "audit.detaudit"
        api.audit(lambda a, b: combine_racing(a, b, TOKENS), (rows, tokens), runs=3, trace=trace)
    with open_trace(trace) as opened:
        assert opened.meta["not_captured"] == {}
    described = json.loads((tmp_path / "audit.detaudit.d" / "operator-root#0" / "case.json").read_text())
    assert (described["entry"], described["module"], described["call"]) == (RACE, "", 0)
    assert described["context"]["threads"] == 4
