"""Values that reach a module other than through its arguments and own state, and memory that nobody wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from detaudit.core.records import Origin
from tests.audit.harness import kinds, run_audit
from tests.support import LeftOver

racy = pytest.mark.usefixtures("racy")

RACE = """
KEPT = {}
TABLE = Combine(True)

def race(x):
    return combine_racing(x.repeat(8, 1), TABLE.target, len(x))
"""


def why(origin: Origin) -> str:
    return origin.mechanism or ""


@racy
def test_what_another_module_left_in_a_global_is_no_uninitialised_memory(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        RACE
        + """
class Leaving(nn.Module):
    def forward(self, x):
        KEPT["sum"] = race(x)
        return x
class Finding(nn.Module):
    def forward(self, x):
        return x + KEPT["sum"]
def build_model(): return nn.Sequential(Leaving(), Finding())
""",
    )
    [origin] = report.origins
    assert (origin.module, origin.isolated) == ("1", False)
    assert "aten.add.Tensor reads args[1]" in why(origin)
    assert "made by aten.index_put_.default in 0 (call 0)" in why(origin)
    assert "uninitialised-memory" not in kinds(report)


@racy
def test_what_another_thread_made_is_no_uninitialised_memory(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        "from concurrent.futures import ThreadPoolExecutor\n"
        + RACE
        + """
class Threaded(nn.Module):
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(race, x).result() * 2
def build_model(): return nn.Sequential(Threaded())
""",
    )
    [origin] = report.origins
    assert origin.module == "0"
    assert "aten.mul.Tensor reads args[0], which differs and whose origin was not seen" in why(origin)
    assert "made by another thread" in why(origin)
    assert "uninitialised-memory" not in kinds(report)


def test_a_kernel_that_no_dispatcher_sees_is_no_uninitialised_memory(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        import ctypes
        class Direct(nn.Module):
            def forward(self, x):
                out = torch.empty(64)
                ctypes.memset(out.data_ptr(), os.urandom(1)[0] % 60, out.nbytes)
                return out * 2
        def build_model(): return nn.Sequential(Direct())
        """,
    )
    [origin] = report.origins
    assert "a kernel that torch's dispatcher does not see" in why(origin)
    assert "uninitialised-memory" not in kinds(report)


def test_memory_that_nobody_wrote_is_uninitialised(tmp_path: Path) -> None:
    with LeftOver(lambda: os.urandom(1)[0] % 60):
        report = run_audit(
            tmp_path,
            """
            class Padding(nn.Module):
                def forward(self, x):
                    padded = torch.empty(2 * len(x), x.shape[1])
                    padded[:len(x)] = x
                    return padded.sum(1)
            def build_model(): return nn.Sequential(Padding(), nn.Tanh())
            """,
        )
    [finding] = [f for f in report.findings if f.kind == "uninitialised-memory"]
    assert finding.module == "0"
    assert "aten.sum.dim_IntList inside it reads args[0]" in finding.message
