from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from detaudit import cli
from detaudit.core.records import KernelReport
from detaudit.kernels import confirm as confirmation
from detaudit.kernels.backend import Unavailable
from detaudit.kernels.cases import Case
from detaudit.kernels.reference_backend import ReferenceBackend
from detaudit.kernels.shapes import Synthetic, parse_shape
from tests.kernels.fakes import FakeBackend, FakeVariant, candidate, control, fake_case, racy, stable

SMALL = "8,4,512,32"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The only backend, under the default's name."""
    backend = FakeBackend(
        [control(racy), candidate(stable, asked=True)], name="flashinfer-cutlass", sweeps=("tactics", "graph")
    )
    monkeypatch.setattr(confirmation, "all_backends", lambda: (backend,))
    monkeypatch.setattr(confirmation, "backend_named", lambda name: backend)
    return backend


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def save_reference(folder: Path, finalize: str) -> Path:
    case = ReferenceBackend().synthetic(Synthetic(parse_shape(SMALL), tokens=256, dtype="nvfp4"))
    assert isinstance(case, Case)
    return dataclasses.replace(case, parameters={**case.parameters, "finalize": finalize}).save(folder)


def read_json(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_text())
    assert (body["format"], body["version"]) == ("detaudit-kernels", 1)
    return body


@pytest.mark.parametrize(("finalize", "code"), [("atomic", 1), ("ordered", 0)])
def test_a_saved_case_with_a_real_race(
    threads: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], finalize: str, code: int
) -> None:
    folder = save_reference(tmp_path / "case", finalize)
    ended = cli.run(["kernels", str(folder), "--runs", "40", "--json", str(tmp_path / "out.json")])
    (kernel,) = read_json(tmp_path / "out.json")["kernels"]
    variants = {variant["name"]: variant for variant in kernel["variants"]}
    if not variants["atomic"]["runs_differing"]:
        pytest.skip("void: the atomic finalize did not vary on this machine, so nothing can be shown")
    assert ended == code
    assert (kernel["outcome"], kernel["backend"], kernel["asked"]) == ("confirmed", "reference", finalize)
    assert variants["ordered"]["runs_differing"] == 0
    printed = capsys.readouterr()
    assert "confirmed: atomic differs in" in printed.out
    assert "finalize=ordered" in printed.out
    assert f"Wrote {tmp_path / 'out.json'}" in printed.err


def test_two_experts_per_token_are_vacuous(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(
        [
            "kernels",
            "--shape",
            SMALL,
            "--backend",
            "reference",
            "--top-k",
            "2",
            "--tokens",
            "128",
            "--runs",
            "5",
        ]
    )
    assert code == 3
    assert "vacuous-control: nothing could differ here: top_k is 2" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_case_of_a_kernel_that_cannot_run_here(
    fake: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.unavailable = Unavailable("this machine has no GPU", "SM100, SM103 and SM120")
    assert cli.run(["kernels", "--shape", "qwen3-30b-a3b", "--tokens", "1,64"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("unsupported: this machine has no GPU; it runs on SM100, SM103 and SM120") == 2
    assert "qwen3-30b-a3b nvfp4, 1 token, top-8, uniform" in out
    assert fake.log == []


def test_json_on_standard_output_stands_alone(
    fake: FakeBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "synthetic", lambda self, wanted: fake_case())
    cli.run(["kernels", "--shape", "16,8,64,64", "--dtype", "bf16", "--runs", "4", "--json", "-"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["format"] == "detaudit-kernels"
    assert "variant" in printed.err


def test_one_report_for_each_number_of_tokens(
    fake: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Synthetic] = []
    monkeypatch.setattr(FakeBackend, "synthetic", lambda self, w: wanted.append(w) or fake_case())  # type: ignore[func-returns-value]
    target = tmp_path / "out.json"
    arguments = ["--shape", "16,8,64,64", "--tokens", "1,16,64", "--routing", "hot", "--top-k", "3"]
    assert cli.run(["kernels", *arguments, "--dtype", "bf16", "--runs", "4", "--json", str(target)]) == 0
    assert [w.tokens for w in wanted] == [1, 16, 64]
    assert {(w.dtype, w.routing, w.shape.top_k) for w in wanted} == {("bf16", "hot", 3)}
    body = read_json(target)
    assert body["exit_code"] == 0
    assert len(body["kernels"]) == 3
    fields = {field.name for field in dataclasses.fields(KernelReport)}
    assert set(body["kernels"][0]) == fields


@pytest.mark.parametrize(
    ("fakes", "code"),
    [
        ([control(racy, asked=True), candidate(stable)], 1),
        ([control(racy), candidate(stable, asked=True)], 0),
        ([control(stable), candidate(stable, asked=True)], 3),
        ([control(stable, fused=False), candidate(stable, asked=True)], 3),
    ],
    ids=["differs", "stable", "not-reproduced", "vacuous"],
)
def test_the_exit_code_is_that_of_the_asked_configuration(
    fake: FakeBackend, tmp_path: Path, fakes: list[FakeVariant], code: int
) -> None:
    fake.fakes = fakes
    folder = fake_case().save(tmp_path / "case")
    assert cli.run(["kernels", str(folder), "--runs", "6"]) == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a CASE folder or --shape"),
        (["somewhere", "--shape", SMALL], "give either a CASE folder or --shape"),
        (["somewhere", "--tokens", "4"], "--tokens makes a synthetic case"),
        (["somewhere", "--top-k", "4"], "--top-k makes a synthetic case"),
        (["somewhere"], "somewhere is not a kernel case"),
        (["--shape", "llama"], "neither one of qwen3-30b-a3b"),
        (["--shape", SMALL, "--tokens", "a,b"], "not a list of numbers"),
        (["--shape", SMALL, "--tokens", "0"], "number below 1"),
        (["--shape", SMALL, "--top-k", "9"], "more than the 8 experts"),
        (["--shape", SMALL, "--sweep", "colours"], "has no sweep 'colours'; it has tactics, graph"),
        (["--shape", SMALL, "--runs", "0"], "--runs"),
        (["--shape", SMALL, "--dtype", "int3"], "--dtype"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(
    fake: FakeBackend, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["kernels", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nobody"], "there is no kernel backend 'nobody'"),
        (["--backend", "reference", "--dtype", "bf16"], "computes in nvfp4, not bf16"),
        (["--backend", "reference", "--sweep", "tactics"], "no sweep 'tactics'; it has none"),
    ],
)
def test_backends_say_what_they_have(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["kernels", "--shape", SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err
