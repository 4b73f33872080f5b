"""Observer control: final outputs with hooks off against those with hooks on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detaudit.compare.classes import FINAL, differing
from detaudit.core.recording import HOOKS_OFF, RunColumns
from detaudit.core.records import Finding
from detaudit.core.stats import fisher_exact

SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Observer:
    """Final outputs (record ids) of runs with hooks ``on`` and ``off``."""

    on: tuple[int, ...]
    off: tuple[int, ...]

    @property
    def off_differs(self) -> bool:
        return len(set(self.off)) > 1

    @property
    def bits_differ(self) -> bool:
        """Each side gives one output only, and not the same one."""
        return len(set(self.on)) == len(set(self.off)) == 1 and set(self.on) != set(self.off)

    @property
    def p_value(self) -> float | None:
        """Fisher's exact test of the two rates of differing outputs; ``None`` with nothing to compare."""
        if len(self.on) < 2 or len(self.off) < 2:
            return None
        on, off = differing(self.on), differing(self.off)
        return fisher_exact(on, len(self.on) - 1 - on, off, len(self.off) - 1 - off)

    @property
    def agree(self) -> bool | None:
        """Whether observing changed neither bits nor rate; ``None`` with nothing to compare."""
        if not self.on or not self.off:
            return None
        if self.p_value is None and not self.bits_differ:
            return True if set(self.on) == set(self.off) else None  # one run has no rate
        return self.p_value is not None and self.p_value >= SIGNIFICANT and not self.bits_differ

    def to_json(self) -> Mapping[str, Any]:
        return {
            "runs_on": len(self.on),
            "runs_off": len(self.off),
            "differing_on": differing(self.on),
            "differing_off": differing(self.off),
            "p_value": self.p_value,
            "agree": self.agree,
        }

    def finding(self) -> Finding | None:
        if self.agree is not False:
            return None
        if self.bits_differ:
            what = "with hooks on every run gives one output, with hooks off every run gives another"
        else:
            what = (
                f"with hooks on {differing(self.on)} of {len(self.on) - 1} comparisons differ, with hooks "
                f"off {differing(self.off)} of {len(self.off) - 1} (Fisher's exact p = {self.p_value:.2g})"
            )
        return Finding("observer-effect", None, f"observing changes the outcome: {what}")


def observe(main: Sequence[RunColumns], runs: Sequence[RunColumns]) -> Observer:
    """Compare the main runs with the hooks-off runs of a trace."""
    off = [run for run in runs if run.condition == HOOKS_OFF]
    return Observer(_finals(main), _finals(off))


def _finals(runs: Sequence[RunColumns]) -> tuple[int, ...]:
    return tuple(run.records[FINAL] for run in runs if FINAL in run.records)
