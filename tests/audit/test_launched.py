"""The profiled run: what it needs, what this process has loaded, and the search for its kernels."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from detaudit import launched
from detaudit.core.errors import Unsupported
from detaudit.launched import launched_by, loaded_libraries, scan_for
from detaudit.progress import Silent
from detaudit.scan.join import join
from detaudit.target import resolve
from tests.scan.support import BARE, KERNELS, tools

MODEL = """
import torch


def build_model():
    return torch.nn.Linear(4, 4)


def make_inputs():
    return torch.ones(2, 4)
"""
ADD = "void fixture::scatter_add<4, float>(float*, float const*, int const*)"


def test_a_script_cannot_be_told_by_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')\n")
    with pytest.raises(Unsupported, match="is a script"):
        launched_by(resolve(str(script)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_error_says_what_can_be_done(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    with pytest.raises(Unsupported, match=r"no CUDA GPU is here.*without --run"):
        launched_by(resolve(str(model)))


def test_a_profiled_run_on_a_cpu_launches_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert launched._profiled(resolve(str(model))) == {}


def test_torch_is_among_the_loaded_libraries() -> None:
    names = {path.name for path in loaded_libraries()}
    assert any(name.startswith("libtorch") for name in names)


def test_files_are_scanned_until_every_kernel_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools()
    cache, library, large = tmp_path / "cache", tmp_path / "jit.so", tmp_path / "large.so"
    cache.mkdir()
    shutil.copy(BARE, cache / "scatter_add.cubin")
    shutil.copy(KERNELS, library)
    large.write_bytes(KERNELS.read_bytes() + bytes(1 << 20))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(launched, "_caches", lambda: [cache])
    monkeypatch.setattr(launched, "loaded_libraries", lambda: [large, library])
    report = scan_for(frozenset({ADD, "spin_lock"}), "sm_90", Silent())
    assert {(kernel.short, Path(kernel.file).name) for kernel in report.kernels} == {
        ("fixture::scatter_add<4, float>", "scatter_add.cubin"),
        ("spin_lock", "jit.so"),
    }
    (module,) = join({"moe": {ADD: 1, "spin_lock": 2}}, report, ("moe",), "sm_90").modules
    assert module.judgement == "suspects in an origin"
    missing = scan_for(frozenset({"nowhere"}), "sm_90", Silent())
    assert [Path(file.path).name for file in missing.files] == ["scatter_add.cubin", "jit.so", "large.so"]
    assert missing.kernels == ()
    large.write_bytes(large.read_bytes() + b"_Z9spin_lockPiPfi")
    found = scan_for(frozenset({"spin_lock"}), "sm_90", Silent())
    assert [Path(file.path).name for file in found.files] == ["scatter_add.cubin", "large.so"]
