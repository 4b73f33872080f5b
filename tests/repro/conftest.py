"""The trace of the NVFP4 example, recorded once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.programs import ROOT, detaudit

QUICK = ("--runs", "4", "--no-history", "--no-observer", "--kernel-runs", "6")


@pytest.fixture(scope="session")
def moe_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A skip where the example did not differ: then there is nothing to reproduce on this machine."""
    trace = tmp_path_factory.mktemp("moe") / "moe.detaudit"
    done = detaudit("run", ROOT / "examples" / "nvfp4_moe.py", "--output", trace, *QUICK)
    if done.returncode == 0:
        pytest.skip("void control: the NVFP4 example did not vary on this machine")
    assert done.returncode == 1, done.stderr
    return trace
