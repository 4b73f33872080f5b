"""The fixture that proves for every test that nothing is left on torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from detaudit.core.digest import HostDigester
from detaudit.hooks.recorder import Recorder
from tests.leaks import GlobalState

ROOT = Path(__file__).parent.parent

LEAKY = """
import torch
from torch import nn
from detaudit.core.digest import HostDigester
from detaudit.hooks.recorder import Recorder

runs = []

def test_clean():
    with Recorder(HostDigester()).run():
        nn.ReLU()(torch.zeros(1))

def test_leaves_a_recording():
    run = Recorder(HostDigester()).run()
    run.__enter__()
    runs.append(run)  # alive, or the generator would be closed here

def test_clean_again():
    assert nn.ReLU()(torch.zeros(1)).item() == 0

def test_leaves_a_dtype():
    torch.set_default_dtype(torch.float64)

def test_leaves_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)

def test_leaves_a_hook():
    nn.modules.module.register_module_forward_hook(lambda *_: None)

def test_leaves_grad_mode():
    torch.set_grad_enabled(False)

def test_last_and_clean():
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
"""


def test_the_fixture_fails_tests_that_leave_something(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-rA"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    bad = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert bad == {
        "test_leaves_a_recording",
        "test_leaves_a_dtype",
        "test_leaves_deterministic_algorithms",
        "test_leaves_a_hook",
        "test_leaves_grad_mode",
    }, done.stdout + done.stderr
    assert "nn.Module.__call__ was" in done.stdout
    assert "ReLU.forward is still wrapped" in done.stdout


def test_leftovers_name_what_was_left_and_put_back_undoes_it() -> None:
    before = GlobalState()
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    run = Recorder(HostDigester()).run()
    run.__enter__()
    left = before.leftovers()
    assert any(text.startswith("threads was") for text in left)
    assert any(text.startswith("cudnn.benchmark was") for text in left)
    assert any("Linear.forward is still wrapped" in text for text in left)
    run.__exit__(None, None, None)
    before.put_back()
    assert before.leftovers() == []


def test_nothing_is_left_after_an_exception() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    before = GlobalState()
    with pytest.raises(ZeroDivisionError), Recorder(HostDigester()).run():
        Fails()(torch.zeros(1))
    assert before.leftovers() == []
