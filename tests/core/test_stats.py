"""Known values are scipy 1.17's (stats.beta.ppf, stats.fisher_exact), computed once."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detaudit.core.stats import beta_quantile, fisher_exact, incomplete_beta, rate, upper_bound

INTERVALS = [
    (1, 19, 0.0013316288041794228, 0.2602806541952142),
    (3, 20, 0.0320709371854637, 0.37892682654531396),
    (10, 19, 0.2886432479169988, 0.7555253105338039),
    (19, 20, 0.7512672372279722, 0.9987349105020502),
    (1, 300, 8.438913231780044e-05, 0.018431252048067885),
    (299, 300, 0.9815687479519322, 0.9999156108676822),
    (150, 1000, 0.12842481111617282, 0.17365812856703597),
    (5, 100_000, 1.623505681705786e-05, 0.00011667943042027703),
]

TABLES = [
    ((8, 2, 1, 5), 0.034965034965034975),
    ((19, 0, 0, 4), 0.00011293054771315638),
    ((19, 1, 0, 5), 0.0001129305477131564),
    ((3, 16, 1, 3), 1.0),
    ((0, 19, 0, 4), 1.0),
    ((12, 5, 7, 9), 0.16632006577356484),
    ((100, 200, 30, 10), 9.771862667804366e-07),
]


@pytest.mark.parametrize(("differing", "comparisons", "low", "high"), INTERVALS)
def test_interval_is_clopper_pearson(differing: int, comparisons: int, low: float, high: float) -> None:
    result = rate(differing, comparisons)
    assert result.estimate == differing / comparisons
    assert result.low == pytest.approx(low, rel=1e-9)
    assert result.high == pytest.approx(high, rel=1e-9)


def test_no_difference_has_the_one_sided_bound() -> None:
    result = rate(0, 19)
    assert (result.estimate, result.low) == (0.0, 0.0)
    assert result.high == upper_bound(19) == pytest.approx(1 - 0.05 ** (1 / 19), rel=1e-12)
    assert upper_bound(300) == pytest.approx(0.00993608, rel=1e-5)


def test_every_comparison_differs() -> None:
    result = rate(19, 19)
    assert (result.estimate, result.high) == (1.0, 1.0)
    assert result.low == pytest.approx(0.025 ** (1 / 19), rel=1e-9)


def test_nothing_compared() -> None:
    result = rate(0, 0)
    assert (result.estimate, result.low, result.high, result.comparisons) == (None, 0.0, 1.0, 0)
    assert upper_bound(0) == 1.0


@pytest.mark.parametrize(("differing", "comparisons"), [(2, 1), (-1, 3), (0, -1)])
def test_impossible_counts_are_refused(differing: int, comparisons: int) -> None:
    with pytest.raises(ValueError, match="not a share"):
        rate(differing, comparisons)


@pytest.mark.parametrize(("table", "expected"), TABLES)
def test_fisher_agrees_with_scipy(table: tuple[int, int, int, int], expected: float) -> None:
    assert fisher_exact(*table) == pytest.approx(expected, rel=1e-9)


def test_fisher_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="negative"):
        fisher_exact(1, -1, 2, 2)


@given(st.integers(1, 60), st.data(), st.floats(0.001, 0.999))
def test_incomplete_beta_is_a_binomial_tail(n: int, data: st.DataObject, p: float) -> None:
    k = data.draw(st.integers(1, n))
    tail = sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))
    assert incomplete_beta(p, k, n - k + 1) == pytest.approx(tail, rel=1e-9, abs=1e-14)


@given(st.floats(0.01, 0.99), st.integers(1, 500), st.integers(1, 500))
def test_quantile_inverts_the_function(probability: float, a: int, b: int) -> None:
    assert incomplete_beta(beta_quantile(probability, a, b), a, b) == pytest.approx(probability, rel=1e-6)


@given(st.integers(1, 200), st.data())
def test_interval_holds_its_estimate(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    result = rate(k, n)
    assert result.estimate is not None
    assert 0 <= result.low <= result.estimate <= result.high <= 1
