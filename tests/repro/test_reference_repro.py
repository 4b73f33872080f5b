"""The NVFP4 example as a folder: runs without detaudit, says what it should, and can be made small."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from detaudit.kernels.cases import Case
from detaudit.kernels.reference import reference_moe
from detaudit.repro.choose import findings
from detaudit.repro.folder import Written, write_repro
from tests.repro.scripts import isolated

FILES = {"repro.py", "case.json", "tensors.safetensors", "environment.json", "REPORT.md"}


@pytest.fixture(scope="module")
def written(moe_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_repro(findings(moe_trace, None), tmp_path_factory.mktemp("repro") / "moe-bug")


@pytest.fixture
def copy(written: Written, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written.folder, tmp_path / "copy"))


def test_the_folder(written: Written) -> None:
    assert {path.name for path in written.folder.iterdir()} == FILES
    assert [path.name for path in written.folder.parent.iterdir()] == ["moe-bug"]
    assert written.finding.module.endswith(".mlp.experts")
    assert written.elements == written.elements_before
    environment = json.loads((written.folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert all(os.access(path, os.R_OK) and path.stat().st_mode & 0o044 for path in written.folder.iterdir())


def test_it_runs_alone_and_differs(written: Written) -> None:
    done = isolated(written.folder, "--json", "numbers.json", "--runs", "30")
    assert done.returncode == 1, done.stderr
    pattern = r'finalize="atomic": \d+ of \d+ runs differ .*, \d+ distinct outputs, largest difference \S+ \('
    assert re.match(pattern, done.stdout)
    numbers = json.loads((written.folder / "numbers.json").read_text())
    (written.folder / "numbers.json").unlink()
    result = numbers["results"]['finalize="atomic"']
    assert numbers["exit_code"] == 1
    assert 1 <= result["differing"] <= result["runs"]
    assert 2 <= result["distinct"] <= result["differing"] + 1
    assert 0 < result["max_abs"] < 1e-4


def test_the_ordered_finalize_is_stable_and_the_control_ran_first(written: Written) -> None:
    done = isolated(written.folder, "--ordered", "--runs", "30")
    assert done.returncode == 0, done.stderr
    control, stable = done.stdout.splitlines()
    assert control.startswith('finalize="atomic": 3 of ')
    assert stable.startswith('finalize="ordered": 0 of 30 runs differ')


def test_nothing_is_shown_with_one_thread(written: Written) -> None:
    done = isolated(written.folder, "--threads", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert "The positive control could not run" in done.stderr


def test_what_cannot_be_run_ends_with_2(copy: Path) -> None:
    assert isolated(copy, "--runs", "0").returncode == 2
    (copy / "tensors.safetensors").unlink()
    missing = isolated(copy)
    assert missing.returncode == 2
    assert missing.stderr.startswith("repro.py: ")
    (copy / "case.json").write_text("{")
    assert isolated(copy).returncode == 2


def test_a_missing_package_or_a_crash_does_not_read_as_a_difference(copy: Path) -> None:
    script = (copy / "repro.py").read_text()
    (copy / "repro.py").write_text(script.replace("from safetensors import", "from flashinfer import"))
    missing = isolated(copy)
    assert missing.returncode == 2
    assert "pip install torch safetensors" in missing.stderr
    (copy / "repro.py").write_text(script.replace("def main(", "def main(*_, **__): 1 / 0\ndef _main("))
    crashed = isolated(copy)
    assert crashed.returncode == 70
    assert "ZeroDivisionError" in crashed.stderr


def test_the_embedded_kernel_gives_the_bits_of_ours(written: Written) -> None:
    names = runpy.run_path(str(written.folder / "repro.py"), run_name="repro")
    saved = names["Saved"](written.folder)
    theirs, ours = saved.on(torch.device("cpu")), Case.load(written.finding.folder)
    assert theirs.tensors.keys() == ours.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(theirs.tensors[name], tensor)
        assert theirs.tensors[name].stride() == tensor.stride()
        assert theirs.tensors[name].data_ptr() % 256 == tensor.data_ptr() % 256
    expected = reference_moe(**dict(ours.tensors), finalize="ordered")  # type: ignore[arg-type]
    assert torch.equal(names["reference_moe"](**theirs.tensors, finalize="ordered"), expected)


def test_the_bug_report(written: Written) -> None:
    text = (written.folder / "REPORT.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        "Your current environment",
        "Describe the bug",
        "Expected behaviour",
        "Steps to reproduce",
        "Measured",
        "What avoids it",
    ]
    assert text.startswith("# `reference_moe` gives different bits for identical inputs")
    assert f"`{written.finding.module}` (NVFP4Experts) of `nvfp4_moe.py`" in text
    assert "| torch | " in text
    assert re.search(r'\| `finalize="atomic"` \| \d+ of \d+ \| \d+ \| \S+ \(.* ULP\) \| .* \| 1 \|', text)
    assert re.search(
        r'\| `finalize="ordered"` \| 0 of \d+ \(at most .*%, 95% confidence\) \| 1 \| 0 .* \| 0 \|', text
    )
    assert "python repro.py --ordered" in text
    assert 'finalize="ordered"' in text.split("## What avoids it")[1]
    assert "| `fc1_weight` | uint8 | [16, 128, 256] |" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minimized_it_is_an_eighth_and_still_differs(moe_trace: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = findings(moe_trace, None)
    written = write_repro(found, tmp_path / "small", minimize_seconds=20.0, say=said.append)
    assert written.elements * 8 <= written.elements_before
    case = Case.load(written.folder)
    assert sum(tensor.numel() for tensor in case.tensors.values()) == written.elements
    assert any(text.startswith("minimizing: trying ") for text in said)
    done = isolated(written.folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert isolated(written.folder, "--ordered").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
