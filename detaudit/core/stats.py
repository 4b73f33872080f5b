"""How rare: exact interval for a rate, and an exact test for two rates. Pure Python; no scipy.

Formulas: Clopper and Pearson, Biometrika 26 (1934), as beta quantiles; the regularized incomplete beta
function by its continued fraction (DLMF 8.17.22); Fisher's exact test by counting tables.
"""

from __future__ import annotations

from math import comb, exp, expm1, lgamma, log, log1p

from detaudit.core.records import Rate

CONFIDENCE = 0.95
_ALPHA = 1 - CONFIDENCE
_TINY = 1e-300


def rate(differing: int, comparisons: int) -> Rate:
    """Share of ``comparisons`` that differ, with its two-sided 95% Clopper-Pearson interval.

    Where none differs, ``high`` is the one-sided bound of ``upper_bound``. Where nothing was compared,
    ``estimate`` is ``None`` and the interval is 0 to 1.

    Raises:
        ValueError: the counts are negative, or more differ than were compared.
    """
    if not 0 <= differing <= comparisons:
        raise ValueError(f"{differing} of {comparisons} is not a share")
    if comparisons == 0:
        return Rate(estimate=None, low=0.0, high=1.0, comparisons=0)
    same = comparisons - differing
    low = beta_quantile(_ALPHA / 2, differing, same + 1) if differing else 0.0
    high = beta_quantile(1 - _ALPHA / 2, differing + 1, same) if same else 1.0
    if differing == 0:
        high = upper_bound(comparisons)
    return Rate(differing / comparisons, low, high, comparisons)


def upper_bound(comparisons: int) -> float:
    """Largest rate compatible (one-sided, 95%) with no difference in ``comparisons``: 1 - 0.05^(1/n)."""
    return -expm1(log(_ALPHA) / comparisons) if comparisons > 0 else 1.0


def fisher_exact(a: int, b: int, c: int, d: int) -> float:
    """Two-sided p-value of the table ((a, b), (c, d)): the tables no likelier than this one.

    Counted in integers, hence exact; meant for up to some thousands of observations.
    """
    first, column, total = a + b, a + c, a + b + c + d
    if min(a, b, c, d) < 0:
        raise ValueError("a count is negative")

    def ways(x: int) -> int:
        return comb(first, x) * comb(total - first, column - x)

    tables = range(max(0, column + first - total), min(first, column) + 1)
    observed = ways(a)
    return sum(w for w in map(ways, tables) if w <= observed) / comb(total, column)


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The x in [0, 1] with ``incomplete_beta(x, a, b) == probability``, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if incomplete_beta(middle, a, b) < probability:
            low = middle
        else:
            high = middle


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized incomplete beta function I_x(a, b) for a, b > 0."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below the mean
        return 1 - incomplete_beta(1 - x, b, a) if x < 1 else 1.0
    front = exp(a * log(x) + b * log1p(-x) + lgamma(a + b) - lgamma(a) - lgamma(b)) / a
    return front * _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of DLMF 8.17.22; needs on the order of sqrt(max(a, b)) terms."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1_000_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
