"""Operators kept with their arguments: whatever torch was given comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import detaudit
from detaudit.core.errors import Unsupported
from detaudit.core.records import Origin
from detaudit.hooks.operator_inputs import OperatorInputs
from detaudit.kernels.cases import Case
from detaudit.repro.choose import findings
from detaudit.repro.folder import write_repro
from detaudit.repro.operator_case import operator_case, save_operators
from detaudit.repro.parts.case import Saved
from detaudit.repro.parts.operator import Operator
from tests.repro.scripts import isolated
from tests.support import TOKENS, combine_racing

ORIGIN = Origin("a.b", "Cls", 2, "module", None, ("out",), 1)


def kept(call: Any, name: str, index: int = 0, budget: int = 1 << 20) -> OperatorInputs:
    inputs = OperatorInputs(lambda: ("a.b", 2), ("a.b", 2), index, name, budget)
    with inputs:
        call()
    return inputs


def repeated(inputs: OperatorInputs, folder: Path) -> list[Tensor]:
    """What the operator gives when it is called from its files."""
    operator_case("case", ORIGIN, inputs).save(folder)
    return list(Operator(Saved(folder)).run(stable=False)())


X = torch.arange(6.0).view(2, 3)
CALLS: dict[str, Any] = {
    "aten.add.Tensor": lambda: torch.add(X, X.t().contiguous().t(), alpha=3),
    "aten.clamp.default": lambda: torch.ops.aten.clamp.default(X, float("-inf"), 4.5),
    "aten._to_copy.default": lambda: torch.ops.aten._to_copy.default(X, dtype=torch.bfloat16),
    "aten.clone.default": lambda: torch.ops.aten.clone.default(X.t(), memory_format=torch.contiguous_format),
    "aten.full_like.default": lambda: torch.full_like(
        X, 2.0, dtype=torch.int64, layout=torch.strided, device=torch.device("cpu")
    ),
    "aten.split.Tensor": lambda: torch.ops.aten.split.Tensor(X, 1),
    "aten.cat.default": lambda: torch.cat([X, X], dim=1),
    "aten.index_put.default": lambda: torch.ops.aten.index_put(
        X, [None, torch.tensor([0, 2])], X[:, :2], True
    ),
    "aten.mul.Tensor": lambda: torch.ops.aten.mul.Tensor(
        torch.view_as_complex(torch.ones(2, 2)).conj(), 2 + 0
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_every_kind_come_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    expected = CALLS[name]()
    inputs = kept(CALLS[name], name)
    if inputs.reason is not None:  # operators before it in the call
        inputs = next(
            found for index in range(1, 8) if (found := kept(CALLS[name], name, index)).reason is None
        )
    outputs = repeated(inputs, tmp_path / "case")
    wanted = [expected] if isinstance(expected, Tensor) else list(expected)
    assert len(outputs) == len(wanted)
    for ours, theirs in zip(outputs, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_an_operator_in_place_begins_with_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    x = torch.ones(3)
    inputs = kept(lambda: x.add_(1), "aten.add_.Tensor")
    operator_case("case", ORIGIN, inputs).save(tmp_path / "case")
    assert json.loads((tmp_path / "case" / "case.json").read_text())["parameters"]["written"] == ["args[0]"]
    run = Operator(Saved(tmp_path / "case")).run(stable=False)
    assert [[t.tolist() for t in run()] for _ in range(3)] == [[[2.0, 2.0, 2.0]]] * 3


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    generator = torch.Generator()
    x = torch.empty(3)
    with_generator = kept(lambda: x.uniform_(generator=generator), "aten.uniform_.default")
    with pytest.raises(Unsupported, match="is a Generator, which cannot be kept"):
        operator_case("case", ORIGIN, with_generator)
    absent = kept(lambda: x + 1, "aten.mul.Tensor")
    large = kept(lambda: x.add_(1), "aten.add_.Tensor", budget=4)
    good = kept(lambda: x.add_(1), "aten.add_.Tensor")
    others = [Origin(path, "Cls", 0, "module", None, (), 1) for path in ("c", "d", "e")]
    pairs = list(zip(others, (absent, large, with_generator), strict=True))
    reasons = save_operators([(ORIGIN, good), *pairs], tmp_path / "t.d")
    assert [path.name for path in (tmp_path / "t.d").iterdir()] == ["operator-a.b#2"]
    assert set(reasons) == {"c", "d", "e"}
    assert "raise --capture-bytes" in reasons["d"]
    assert Case.load(tmp_path / "t.d" / "operator-a.b#2").entry == "torch.ops:aten.add_.Tensor"


@pytest.mark.usefixtures("racy")
def test_a_race_in_an_operator_as_a_folder(tmp_path: Path) -> None:
    rows = torch.randn(8 * TOKENS, 64, generator=torch.Generator().manual_seed(0))
    tokens = torch.randperm(8 * TOKENS) % TOKENS
    trace = tmp_path / "t.detaudit"
    report = detaudit.audit(lambda a, b: combine_racing(a, b, TOKENS), (rows, tokens), runs=4, trace=trace)
    assert report.origins[0].operator == "aten.index_put_.default"
    written = write_repro(findings(trace, None), tmp_path / "bug")
    done = isolated(written.folder)
    assert done.returncode == 1, done.stderr
    stable = isolated(written.folder, "--deterministic", "--runs", "30")
    assert stable.returncode == 0, stable.stdout + stable.stderr
    assert "torch.use_deterministic_algorithms(True): 0 of 30 runs differ" in stable.stdout
    page = (written.folder / "REPORT.md").read_text()
    assert page.startswith("# `aten.index_put_.default` gives different bits")
    assert "adds from several threads at once" in page
