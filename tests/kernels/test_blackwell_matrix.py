"""scripts/blackwell_matrix without a Blackwell GPU: its cells, one of them run, a crash, the report."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.kernels.flashinfer_sm90 import FUSED, UNFUSED, Machine, compiled

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "blackwell_matrix"


@pytest.fixture
def script() -> Iterator[ModuleType]:
    loader = importlib.machinery.SourceFileLoader("blackwell_matrix", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    try:
        loader.exec_module(module)
        yield module
    finally:
        del sys.modules[loader.name]


def test_the_matrix_covers_what_it_promises(script: ModuleType) -> None:
    cells = list(script.matrix("nvfp4"))
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.tokens for cell in cells} == {1, 16, 64, 1024}
    assert {cell.top_k for cell in cells} == {1, 2, 3, 8}
    assert {cell.routing for cell in cells} == {"uniform", "skewed", "hot"}
    assert {cell.quantized for cell in cells} == {cell.sweep for cell in cells} == {True, False}


def test_a_sweep_is_counted_and_can_be_written(script: ModuleType) -> None:
    pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)
    with compiled(Machine()):
        result = script.run_cell(script.Cell("bf16", 6, 4, sweep=True), "8,4,64,32", 8)
    result = json.loads(json.dumps(result))
    assert result["sweep"]["fused"]["tactics"] == len(FUSED)
    assert result["sweep"]["fused"]["differing"] == FUSED.count("FINALIZE")
    assert result["sweep"]["unfused"]["tactics"] == len(UNFUSED)
    assert result["report"]["kernels"][0]["outcome"] == "vacuous-control"
    assert "2 of 5 differ" in script.line(result)


def test_a_case_that_crashes_ends_alone(script: ModuleType) -> None:
    result = script.in_child('{"cell": {"dtype": "none"}}', timeout=60)
    assert "failed" in result
    assert "TypeError" in result["stderr"]
