"""Random programs with planted nondeterminism: all of it is found, and nothing else is accused."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from detaudit.compare import analyze
from detaudit.core.records import Report
from tests.compare.simulate import Module, Program, Step, TooLarge, Truth, simulate

CALLS = ("call", "fork", "branch")
SEARCH = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@st.composite
def programs(draw: st.DrawFn, extra: tuple[str, ...] = (), state: bool = False) -> Program:
    """Up to seven modules; ``extra``: kinds of steps beside calls; ``state``: with counters and caches."""
    size = draw(st.integers(2, 7))
    modules = []
    for index in range(size):
        kinds = [*(CALLS if index < size - 1 else ()), *(e for e in extra if e != "poke" or index < size - 1)]
        steps = []
        for _ in range(draw(st.integers(0, 4)) if kinds else 0):
            kind = draw(st.sampled_from(kinds))
            target = draw(st.integers(index + 1, size - 1)) if kind in (*CALLS, "poke") else 0
            steps.append(Step(kind, target))
        counter = state and draw(st.integers(0, 9)) == 0
        cache = state and draw(st.integers(0, 3)) == 0
        modules.append(Module(tuple(steps), counter, cache))
    return Program(tuple(modules), faces=draw(st.sampled_from((2, 3, 1000))))


def run(program: Program, seed: int, runs: int = 5) -> tuple[Report, Truth]:
    try:
        trace, truth = simulate(program, runs, seed)
    except TooLarge:
        assume(False)
    return analyze(trace), truth


def check(program: Program, report: Report, truth: Truth) -> None:
    accused = {int(origin.module[1:] or 0) for origin in report.origins}
    planted = truth.drawing() | truth.carried
    assert accused <= planted, f"accused without reason: {accused - planted}"
    for module in truth.proven():
        assert truth.within(module) & accused, f"m{module} differed for equal inputs, accused are {accused}"
    event(f"origins: {len(accused)}")
    event(f"findings: {sorted({f.kind for f in report.findings})}")


@SEARCH
@given(programs(), st.integers(0, 1 << 20))
def test_nothing_planted_nothing_found(program: Program, seed: int) -> None:
    report, _ = run(program, seed)
    assert (report.verdict, report.origins, report.findings) == ("deterministic", (), ())


@SEARCH
@given(programs(extra=("noise", "mask")), st.integers(0, 1 << 20))
def test_noise(program: Program, seed: int) -> None:
    report, truth = run(program, seed)
    check(program, report, truth)


@SEARCH
@given(programs(extra=("noise", "mask"), state=True), st.integers(0, 1 << 20))
def test_noise_and_state(program: Program, seed: int) -> None:
    report, truth = run(program, seed)
    check(program, report, truth)


@SEARCH
@given(programs(extra=("noise", "mask", "poke"), state=True), st.integers(0, 1 << 20))
def test_noise_and_state_written_by_others(program: Program, seed: int) -> None:
    report, truth = run(program, seed)
    accused = {int(origin.module[1:] or 0) for origin in report.origins}
    assert accused <= truth.drawing() | truth.carried
