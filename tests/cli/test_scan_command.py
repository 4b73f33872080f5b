"""``detaudit scan`` as a user types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from detaudit import cli
from tests.scan.support import BARE, KERNELS, PTX_ONLY, plain, tools

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools()  # skips where there is no disassembler
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_file(capsys: Captured) -> None:
    assert cli.run(["scan", str(BARE)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("1 kernel can accumulate in an unordered way\n")
    assert "fixture::scatter_add<4, float>" in shown.out
    assert shown.err == ""


def test_the_exit_code_tells_of_suspects_on_request() -> None:
    assert cli.run(["scan", str(BARE), "--exit-code"]) == 1
    assert cli.run(["scan", str(KERNELS), "--kernel", "none", "--exit-code"]) == 0


def test_only_some_kernels_of_one_architecture(capsys: Captured) -> None:
    arguments = ["--sm", "sm_90", "--kernel", "*ticket*", "--kernel", "counter", "--format", "json"]
    assert cli.run(["scan", str(KERNELS), *arguments]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert {(kernel["name"], plain(kernel["arch"])) for kernel in kernels} == {
        (name, "sm_90") for name in ("ticket_order", "shared_ticket_order", "counter")
    }


def test_no_machine_code_is_inconclusive(tmp_path: Path, capsys: Captured) -> None:
    assert cli.run(["scan", str(PTX_ONLY)]) == 3
    assert "PTX is compiled on the machine that runs it" in " ".join(capsys.readouterr().out.split())
    assert cli.run(["scan", str(tmp_path)]) == 3
    assert capsys.readouterr().out.startswith("no kernel found: nothing here holds machine code")
    assert cli.run(["scan", str(KERNELS), "--kernel", "no_such_kernel"]) == 3


def test_new_suspects_against_an_earlier_scan(tmp_path: Path, capsys: Captured) -> None:
    lock = tmp_path / "suspects.json"
    assert cli.run(["scan", str(BARE), "--format", "json", "--output", str(lock)]) == 0
    assert capsys.readouterr().err == f"Wrote {lock}\n"
    assert cli.run(["scan", str(BARE), "--against", str(lock)]) == 0
    assert "no new suspects" in capsys.readouterr().out
    assert cli.run(["scan", str(BARE), str(KERNELS), "--against", str(lock)]) == 1
    assert "new suspects" in capsys.readouterr().out
    assert cli.run(["scan", str(BARE), str(KERNELS), "--against", str(lock), "--format", "json"]) == 1
    assert "float_atomic" in json.loads(capsys.readouterr().out)["new_suspects"]


def test_sarif(capsys: Captured) -> None:
    assert cli.run(["scan", str(BARE), "--format", "sarif"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["unordered-accumulation"]


def test_a_folder_twice_is_disassembled_once(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "triton" / "HASH"
    folder.mkdir(parents=True)
    shutil.copy(BARE, folder / "kernel.cubin")
    assert cli.run(["scan", str(tmp_path / "triton")]) == 0
    first = capsys.readouterr().out
    assert len(list((tmp_path / "cache" / "detaudit" / "scan").rglob("*.json"))) == 1
    assert cli.run(["scan", str(tmp_path / "triton")]) == 0
    assert capsys.readouterr().out == first


def test_the_cache_may_be_left_alone(tmp_path: Path) -> None:
    assert cli.run(["scan", str(BARE), "--no-cache"]) == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a PATH, --package NAME or --run TARGET"),
        (["missing.so"], "missing.so does not exist"),
        (["--package", "no_such_package"], "no package 'no_such_package' is installed"),
        ([str(BARE), "--against", "missing.json"], "cannot read missing.json"),
        ([str(BARE), "--against", str(BARE)], "is not JSON"),
        ([str(BARE), "--output", str(BARE)], "would be written over"),
        ([str(BARE), "--sm", "abc"], "--sm 'abc' is no architecture"),
        ([str(BARE), "--sm", "9.0"], "--sm '9.0' is no architecture"),
        ([str(BARE), "--audit", "x.detaudit"], "--audit goes with --run"),
        ([str(BARE), "--run", "model.py"], "--run scans what the target loads"),
        (["--run", "missing.py"], "missing.py"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["scan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_lock_of_another_kind_is_refused(tmp_path: Path, capsys: Captured) -> None:
    for text in ("[]", "{}", '{"format": "detaudit-scan", "version": 9}'):
        (tmp_path / "lock.json").write_text(text)
        assert cli.run(["scan", str(BARE), "--against", str(tmp_path / "lock.json")]) == 2
        assert str(tmp_path / "lock.json") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--static"], "--static takes --sm NUMBER"),
        (["--static", "--sm", "120", "--shape", "8,2,64,64"], "no CASE or --shape"),
        (["--sm", "120", "--shape", "8,2,64,64"], "--sm goes with --static"),
    ],
)
def test_static_kernels_as_they_cannot_be_meant(arguments: list[str], message: str, capsys: Captured) -> None:
    assert cli.run(["kernels", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_was_named_and_holds_nothing_is_told(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see")
    assert cli.run(["scan", str(tmp_path / "notes.txt")]) == 3
    assert "notes.txt: no machine code for a GPU in it" in " ".join(capsys.readouterr().out.split())
