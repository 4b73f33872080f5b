"""A small repository with a policy and two targets, as users have them."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from detaudit import cli
from detaudit.auditing import audit
from detaudit.core.errors import DetauditError
from detaudit.core.options import Options
from detaudit.gate.policy import TargetPolicy
from detaudit.gate.recording import Recorded
from detaudit.target import resolve

ROOT = Path(__file__).parents[2]

STABLE = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

def make_inputs():
    return torch.ones(2, 8)
"""

TWO_LAYERS = """
import torch
from torch import nn
from tests.support import Stack

def build_model():
    torch.set_num_threads(4)
    torch.manual_seed(0)
    return Stack(racing={racing})

def make_inputs():
    return torch.randn({tokens}, 512, generator=torch.Generator().manual_seed(1))
"""

POLICY = """
[project]
name = "engine"

[tool.detaudit]
targets = ["head.py", "serving/experts.py"]
runs = 3
"""


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Repository:
    """``head.py`` is stable; ``serving/experts.py`` has layers of which those in ``racing`` race."""

    def __init__(self, folder: Path, *, racing: tuple[int, ...] = (), policy: str = POLICY) -> None:
        self.folder = folder
        (folder / "serving").mkdir()
        self.write("pyproject.toml", policy)
        self.write("head.py", STABLE)
        self.write("serving/experts.py", TWO_LAYERS.format(racing=racing, tokens=1024 if racing else 8))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def files(self) -> list[str]:
        found = (p.relative_to(self.folder) for p in self.folder.rglob("*") if p.is_file())
        return sorted(str(path) for path in found if "__pycache__" not in path.parts)

    def gate(self, *arguments: str, **env: str) -> Done:
        """``detaudit gate`` in this process, its audits too: seconds instead of minutes."""
        with mock.patch("detaudit.gate.gate.record", record_here):
            return self.detaudit("gate", *arguments, **env)

    def gate_process(self, *arguments: str) -> Done:
        """``detaudit gate`` as users start it: in a process of its own, as is each audit."""
        process = self.start("gate", *arguments)
        out, err = process.communicate(timeout=180)
        return Done(process.returncode, out, err)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "detaudit", *arguments],
            cwd=self.folder,
            env={**_environment(), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def detaudit(self, *arguments: str, **env: str) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, {**_environment(), **env}, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = cli.run(arguments)
        return Done(code, out.getvalue(), err.getvalue())

    def forget(self) -> None:
        """Targets are imported once a process; one that was edited must be imported anew."""
        forget(self.folder)


def forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(folder.resolve()):
            del sys.modules[name]


def record_here(
    target: TargetPolicy, path: Path, trace: Path, limit: float | None, *, confirm: bool = True
) -> Recorded:
    """``detaudit.gate.recording.record`` without a process of its own, and without a time limit."""
    options = Options(
        runs=target.runs, only=target.only, exclude=target.exclude, history=False, confirm=False
    )
    threads = torch.get_num_threads()
    try:
        audit(resolve(str(path), script=target.script, argv=target.args), options, trace)
    except DetauditError as error:
        return Recorded(0.1, str(error), getattr(error, "frames", ""), error.exit_code)
    finally:
        torch.set_num_threads(threads)
        forget(path.parent)
    return Recorded(0.1)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}


def one_line(done: Done) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("detaudit: ")
    return lines[0]
