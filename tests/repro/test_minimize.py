"""Delta debugging: as small as the predicate allows, no combination twice, within the time."""

from __future__ import annotations

from itertools import count

from detaudit.kernels.cases import Case
from detaudit.repro.minimize import minimize
from detaudit.repro.shrink import axes, elements
from tests.repro.scripts import reference_case

CASE = reference_case(tokens=256, experts=16, top_k=8, hidden=512, intermediate=64)


def sizes(case: Case) -> dict[str, int]:
    return {axis.name: axis.size for axis in axes(case)}


def test_as_small_as_the_race_allows() -> None:
    """As on a CPU: terms are added by several threads from 32,768 elements on."""
    seen: list[tuple[int, ...]] = []

    def differs(case: Case) -> bool:
        now = sizes(case)
        seen.append(tuple(now.values()))
        return now["tokens"] * now["hidden"] * 8 >= 32768

    found = minimize(CASE, differs, 60.0)
    now = sizes(found)
    assert (now["experts"], now["intermediate"]) == (8, 16)
    assert 32768 <= now["tokens"] * now["hidden"] * 8 < 2 * 32768
    assert elements(found) * 8 <= elements(CASE)
    assert len(seen) == len(set(seen))


def test_nothing_smaller_differs() -> None:
    assert minimize(CASE, lambda _: False, 60.0) is CASE


def test_everything_differs() -> None:
    assert sizes(minimize(CASE, lambda _: True, 60.0)) == {
        "experts": 8, "intermediate": 16, "hidden": 16, "tokens": 1
    }  # fmt: skip


def test_the_time_is_kept() -> None:
    ticks = count()
    calls: list[Case] = []

    def differs(case: Case) -> bool:
        calls.append(case)
        return True

    found = minimize(CASE, differs, 5.0, clock=lambda: float(next(ticks)))
    assert 1 <= len(calls) <= 5
    assert found is calls[-1]
    assert minimize(CASE, differs, 0.0) is CASE


def test_one_that_only_sometimes_differs_costs_no_second_try() -> None:
    answers = iter([True, False] * 100)
    seen: list[tuple[int, ...]] = []

    def differs(case: Case) -> bool:
        seen.append(tuple(sizes(case).values()))
        return next(answers)

    minimize(CASE, differs, 60.0)
    assert len(seen) == len(set(seen))
