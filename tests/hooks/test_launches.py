"""Triton launches and custom operators are counted by module, by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detaudit.hooks.launches import LaunchTap

JIT = """
class JITFunction:
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, grid, warmup, **kwargs):
        return self.fn(*args)

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

def jit(fn):
    return JITFunction(fn)
"""


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with Triton's names that runs its kernels as plain functions."""
    if "triton" in sys.modules:
        pytest.skip("the real triton is loaded in this process")
    for name, text in {"__init__.py": "", "runtime/__init__.py": "", "runtime/jit.py": JIT}.items():
        (tmp_path / "triton" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "triton" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]


@pytest.fixture
def sneaky() -> Iterator[Any]:
    library = torch.library.Library("detaudit_test_launches", "DEF")  # type: ignore[no-untyped-call]
    library.define("twice(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("twice", lambda x: x * 2, "CPU")  # type: ignore[no-untyped-call]
    yield torch.ops.detaudit_test_launches.twice
    library._destroy()  # type: ignore[no-untyped-call]


def add_one(x: int) -> int:
    return x + 1


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("loaded_before", [True, False])
def test_triton_launches_are_counted_where_they_happen(loaded_before: bool) -> None:
    at: list[tuple[str, int]] = []
    if loaded_before:
        importlib.import_module("triton.runtime.jit")
    with LaunchTap(lambda: at[-1] if at else None) as tap:
        jit = importlib.import_module("triton.runtime.jit")
        kernel = jit.jit(add_one)
        assert kernel[(1,)](1) == 2
        at.append(("layers.0", 3))
        assert [kernel[(1,)](i) for i in range(3)] == [1, 2, 3]
        kernel.run(1, grid=(1,), warmup=True)
    assert tap.by_module() == {"": {"triton:add_one": 1}, "layers.0": {"triton:add_one": 3}}
    assert kernel[(1,)](1) == 2
    assert tap.by_module()[""] == {"triton:add_one": 1}
    assert jit.JITFunction.run.__qualname__ == "JITFunction.run"


@pytest.mark.usefixtures("triton")
def test_own_kernels_are_left_out_and_exceptions_pass() -> None:
    jit = importlib.import_module("triton.runtime.jit")

    def ours() -> None: ...

    ours.__module__ = "detaudit.core.device"
    with LaunchTap(lambda: None) as tap:
        jit.jit(ours)[(1,)]()
    assert tap.by_module() == {}
    with pytest.raises(ZeroDivisionError), tap:
        jit.jit(lambda: 1 / 0)[(1,)]()
    assert tap.by_module() == {"": {"triton:<lambda>": 1}}
    assert jit.JITFunction.run.__qualname__ == "JITFunction.run"
    assert torch._C._len_torch_dispatch_stack() == 0


def test_custom_operators_are_counted_and_torchs_own_are_not(sneaky: Any) -> None:
    with LaunchTap(lambda: ("mlp", 0)) as tap:
        sneaky(sneaky(torch.ones(2) + 1))
    assert tap.by_module() == {"mlp": {"operator:detaudit_test_launches.twice.default": 2}}
