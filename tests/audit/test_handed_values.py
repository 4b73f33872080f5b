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


@racy
def test_the_code_around_a_module_is_accused_of_the_parameter_it_swaps_in(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        RACE
        + """
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
    def forward(self, x):
        return torch.func.functional_call(self.inner, {"0.weight": race(x)[:8, :8]}, (x[:, :8],))
def build_model():
    torch.manual_seed(0)
    return nn.Sequential(Hyper(), nn.Tanh())
""",
    )
    [origin] = report.origins
    assert (origin.module, origin.part, origin.operator) == ("0", "own-code", "aten.index_put_.default")
    assert origin.healed


READS = """
class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.racing, self.reading = Combine(True), nn.Sequential(READER())
    def forward(self, x):
        KEPT["sum"] = self.racing(x)
        return self.reading(x)
def build_model(): return Around()
"""


@racy
def test_a_module_that_reads_what_an_origin_made_is_no_origin(tmp_path: Path) -> None:
    reader = """
class Reader(nn.Module):
    def forward(self, x): return x + KEPT["sum"]
"""
    report = run_audit(tmp_path, RACE + reader + READS.replace("READER", "Reader"))
    [origin] = report.origins
    assert (origin.module, origin.healed) == ("racing", True)
    [finding] = [f for f in report.findings if f.kind == "unobserved-producer"]
    assert finding.module == "reading.0"
    assert "agrees with the outputs of racing held fixed" in finding.message


@racy
def test_a_module_that_reads_what_an_origin_made_and_races_is_one(tmp_path: Path) -> None:
    reader = """
class Reader(nn.Module):
    def forward(self, x): return race(x + KEPT["sum"])
"""
    report = run_audit(tmp_path, RACE + reader + READS.replace("READER", "Reader"))
    assert [(o.module, o.operator) for o in report.origins] == [
        ("racing", "aten.index_put_.default"),
        ("reading.0", "aten.index_put_.default"),
    ]


POOL = """
class Filling(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool
        self.steps = 0
    def forward(self, x):
        self.pool.zero_()
        self.pool.index_put_((TABLE.target,), x.repeat(8, 1), accumulate=True)
        self.steps += COUNT
        return x
class Reading(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool
    def forward(self, x):
        return x + self.pool
def build_model():
    pool = torch.zeros(inputs().shape)
    return nn.Sequential(Filling(pool), Reading(pool))
"""


@racy
def test_what_a_race_left_behind_is_not_the_cause_of_the_race(tmp_path: Path) -> None:
    report = run_audit(tmp_path, RACE + POOL.replace("COUNT", "0"))
    [origin] = report.origins
    assert (origin.module, origin.sites) == ("0", ("attr.pool",))
    assert origin.operator == "aten.index_put_.default"
    assert "adds from several threads at once" in why(origin)
    assert origin.isolated is None
    assert origin.healed is None
    [finding] = [f for f in report.findings if f.kind == "history-dependent"]
    assert finding.message.endswith("attr.pool; an operator inside races, and may have left it so")


@racy
def test_a_counter_beside_a_race_is_still_told(tmp_path: Path) -> None:
    report = run_audit(tmp_path, RACE + POOL.replace("COUNT", "1"))
    [origin] = report.origins
    assert origin.operator == "aten.index_put_.default"
    [finding] = [f for f in report.findings if f.kind == "history-dependent"]
    assert finding.message.endswith("not written in the run: attr.steps")
