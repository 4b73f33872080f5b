"""What a comparison of two traces found. Plain data, JSON out; never imports torch.

The JSON form is ``format: "detaudit-comparison"``, ``version: 1``. Fields may be added within a version.
History: 1, first version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from detaudit.core.errors import EXIT_INCONCLUSIVE, EXIT_NONDETERMINISTIC, EXIT_STABLE
from detaudit.core.gating import Change, EnvironmentChange

FORMAT = "detaudit-comparison"
VERSION = 1

Outcome = Literal["equal", "within tolerance", "different", "inconclusive"]
EXIT_CODES: Mapping[Outcome, int] = {
    "equal": EXIT_STABLE,
    "within tolerance": EXIT_STABLE,
    "different": EXIT_NONDETERMINISTIC,
    "inconclusive": EXIT_INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest acceptable difference; where both are given, both must hold.

    Args:
        ulp: units in the last place, of every element.
        rel: ||b - a|| / ||a|| of every tensor, in double precision.
    """

    ulp: int | None = None
    rel: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.ulp} ULP"] if self.ulp is not None else []
        parts += [f"relative error {self.rel:g}"] if self.rel is not None else []
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class SiteDifference:
    """One tensor or scalar that differs.

    Args:
        a, b: dtype and shape on each side, ``float32[2, 8]``; None where the site is absent.
        rows: rows that differ (indices over all dimensions but the last); None where it is not known.
        max_ulp, max_abs, rel_error: None where the bytes were not kept (only those of values of at most 4 KiB
            are), or where they do not apply; ``reason`` says which.
        unbounded: whether a NaN or an infinity stands against another number.
    """

    site: str
    a: str | None
    b: str | None
    rows: tuple[int, ...] | None = None
    rows_total: int | None = None
    max_ulp: int | None = None
    max_abs: float | None = None
    rel_error: float | None = None
    reason: str | None = None
    unbounded: bool = False

    def within(self, tolerance: Tolerance) -> bool | None:
        """Whether the difference is within the tolerance; None where that cannot be told."""
        if self.a != self.b or self.unbounded:
            return False
        decided = [_at_most(self.max_ulp, tolerance.ulp), _at_most(self.rel_error, tolerance.rel)]
        if False in decided:
            return False
        return None if None in decided else True


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Two traces side by side; ``a`` is the earlier or trusted one.

    Args:
        a, b: paths. ``targets``: what each was recorded from.
        reason: one sentence on why the outcome is what it is.
        calls: calls of ``b`` that had the same arguments in ``a``, hence were compared.
        change: the first call that differs; ``sites`` are its outputs that do.
        final: sites of the final output that differ.
        varying: modules that vary within one of the traces, about which nothing was shown.
        parameters: parameters by path whose bits differ.
        environment: entries of the environment that differ, those of the fingerprint first.
    """

    a: str
    b: str
    targets: tuple[str, str]
    outcome: Outcome
    reason: str
    condition: str = ""
    calls: int = 0
    change: Change | None = None
    sites: tuple[SiteDifference, ...] = ()
    final: tuple[SiteDifference, ...] = ()
    varying: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    environment: tuple[EnvironmentChange, ...] = ()
    tolerance: Tolerance | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        head = {"format": FORMAT, "version": VERSION, "outcome": self.outcome, "exit_code": self.exit_code}
        return head | {key: value for key, value in dataclasses.asdict(self).items() if key != "outcome"}


def _at_most(found: float | None, wanted: float | None) -> bool | None:
    if wanted is None:
        return True
    return None if found is None else found <= wanted
