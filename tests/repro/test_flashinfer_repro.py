"""The script for a FlashInfer call, over FlashInfer's own Python and a compiled module that is made up.

The script's text is executed here, not the modules it was cut from. tests/gpu has the real kernel.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detaudit.repro.parts.measure import Result
from detaudit.repro.script import FLASHINFER, build_script
from tests.kernels.flashinfer_sm90 import FIRST_FUSED, Machine, compiled, tiny_case

pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)


def script(machine: Machine) -> dict[str, Any]:
    """The script's names, with the CPU for the GPU and the machine's word for what a launch ran."""
    module = sys.modules["repro_flashinfer"] = types.ModuleType("repro_flashinfer")
    names = vars(module)
    exec(compile(build_script(FLASHINFER, "Title.", threads=1, runs=10), "repro.py", "exec"), names)
    names["gpu"] = lambda: torch.device("cpu")
    names["kernel_names"] = machine.kernel_names
    return names


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def names(machine: Machine) -> Iterator[dict[str, Any]]:
    with compiled(machine):
        yield script(machine)


def subject(names: dict[str, Any], folder: Path, **shape: Any) -> Any:
    tiny_case(**shape).save(folder / "case")
    return names["FlashInferMoe"](names["Saved"](folder / "case"))


def measured(names: dict[str, Any], call: Any, *, stable: bool) -> Result:
    result: Result = names["measure"](call.run(stable=stable), 10, 60.0)
    return result


def test_the_first_fused_tactic_is_pinned_and_differs(
    names: dict[str, Any], machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = subject(names, tmp_path)
    assert call.tactic == FIRST_FUSED
    assert f"gemm2 tactic {FIRST_FUSED} finalizes in its epilogue" in capsys.readouterr().out
    assert measured(names, call, stable=False).differing > 0
    assert machine.launched[-1] == machine.launched[-1] | {"kind": "FINALIZE", "profile": [-1, FIRST_FUSED]}


def test_unfused_takes_the_default_tactic_and_is_stable(
    names: dict[str, Any], machine: Machine, tmp_path: Path
) -> None:
    call = subject(names, tmp_path)
    machine.launched.clear()
    result = measured(names, call, stable=True)
    assert (result.runs, result.differing) == (10, 0)
    assert {launch["kind"] for launch in machine.launched} == {"none"}


def test_where_kernels_cannot_be_listed_a_tactic_counts_as_fused_if_it_differs(
    names: dict[str, Any], tmp_path: Path
) -> None:
    names["kernel_names"] = lambda _work: []
    assert subject(names, tmp_path).tactic == FIRST_FUSED


def test_without_a_fused_tactic_the_control_cannot_run(tmp_path: Path) -> None:
    machine = Machine(fuses=False)
    with compiled(machine):
        names = script(machine)
        with pytest.raises(names["Unsupported"], match="no tactic fuses the finalize here"):
            subject(names, tmp_path)


def test_two_terms_cannot_differ(names: dict[str, Any], tmp_path: Path) -> None:
    case = tiny_case()
    few = {
        name: case.tensors[name][:, :2].contiguous()
        for name in ("token_selected_experts", "token_final_scales")
    }
    names["Saved"] = type(
        "Saved", (), {"on": lambda self, _device: names["Case"]("c", {**case.tensors, **few}, {})}
    )
    with pytest.raises(names["Unsupported"], match="with top_k 2"):
        names["FlashInferMoe"](names["Saved"]())


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_it_ends_with_3(tmp_path: Path) -> None:
    tiny_case().save(tmp_path / "case")
    (tmp_path / "case" / "repro.py").write_text(build_script(FLASHINFER, "Title.", threads=1, runs=10))
    done = subprocess.run(
        [sys.executable, "repro.py"],
        cwd=tmp_path / "case",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "it was captured on a CUDA GPU, and torch finds none here" in done.stderr
