"""Triton kernels, compiled for GPUs that need not be here, and found in Triton's cache."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.sources import files_of
from tests.scan.support import plain, tools

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

KERNELS = """
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scatter_add(out, x, index, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(out + tl.load(index + at), tl.load(x + at))


@triton.jit
def count(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(out + tl.load(x + at), 1)


@triton.jit
def double(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) * 2)


SIGNATURES = {
    scatter_add: {"out": "*fp32", "x": "*fp32", "index": "*i32", "N": "constexpr"},
    count: {"out": "*i32", "x": "*i32", "N": "constexpr"},
    double: {"out": "*fp32", "x": "*fp32", "N": "constexpr"},
}
for kernel, signature in SIGNATURES.items():
    source = ASTSource(kernel, signature, constexprs={"N": 128})
    triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
"""


@pytest.mark.parametrize("sm", ["80", "90", "120"])
def test_kernels_in_tritons_cache(sm: str, tmp_path: Path) -> None:
    tools()
    script, cache = tmp_path / "kernels.py", tmp_path / "cache"
    script.write_text(KERNELS)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(script), sm], env=environment, capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        pytest.skip(f"this Triton cannot compile for SM{sm} here: {done.stderr.strip().splitlines()[-1]}")
    report = scan(plan(files_of([cache])), tools(), Settings())
    assert {(k.name, plain(k.arch), k.suspect) for k in report.kernels} == {
        ("scatter_add", f"sm_{sm}", True),
        ("count", f"sm_{sm}", False),
        ("double", f"sm_{sm}", False),
    }
    (suspect,) = report.suspects
    assert {(a.operation, a.dtype) for a in suspect.atomics if a.category == "accumulation"} == {
        ("add", "f32")
    }
