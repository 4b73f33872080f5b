"""History control: two fresh processes ran the same sequence, and run k is compared with run k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detaudit.compare.classes import INPUTS, whole_keys
from detaudit.core.recording import HISTORY, RunColumns


@dataclass(frozen=True, slots=True)
class History:
    """``positions`` compared, how many of them ``differing``, and whether runs differ along the sequence."""

    positions: int
    differing: int
    varies: bool

    @property
    def hidden_state(self) -> bool:
        """The same sequence twice, and not the same run over and over: state, not a race."""
        return self.positions >= 2 and self.differing == 0 and self.varies


def compare_history(runs: Sequence[RunColumns]) -> History | None:
    """``None`` where the trace holds no such pair of sequences, or they were not given the same inputs."""
    first, second = ([run for run in runs if run.condition == name] for name in HISTORY)
    pairs = list(zip(first, second, strict=False))
    if not pairs or any(a.records.get(INPUTS) != b.records.get(INPUTS) for a, b in pairs):
        return None
    keys = whole_keys([run for pair in pairs for run in pair])
    differing = sum(a != b for a, b in zip(keys[::2], keys[1::2], strict=True))
    return History(len(pairs), differing, varies=len(set(keys[::2])) > 1)
