"""Runs grouped by what they recorded. Runs of one class agree in every call; later steps see classes only."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from detaudit.core.recording import FRESH_PROCESS, IN_PROCESS, RunColumns

MAIN_CONDITIONS = (IN_PROCESS, FRESH_PROCESS)
"""Repeats of the target on identical inputs and state: what the verdict compares with each other."""
INPUTS = "inputs"
FINAL = "final"
GRAD = "grad"


@dataclass(frozen=True, slots=True, eq=False)
class RunClass:
    """Runs whose calls are all equal. ``members`` are indices into the list of runs that was grouped."""

    run: RunColumns
    members: tuple[int, ...]

    @property
    def weight(self) -> int:
        return len(self.members)


def columns_key(run: RunColumns) -> Hashable:
    """Equal for two runs exactly where all their calls are."""
    columns = (run.module, run.parent, run.flags, run.args, run.state, run.out)
    return tuple(column.tobytes() if isinstance(column, array) else tuple(column) for column in columns)


def record_keys(runs: Sequence[RunColumns]) -> list[Hashable]:
    """For each run its outcomes beside the calls: final output, gradients, state too large for every call.

    What was not taken in every run is left out; gradients that some runs lack are a difference. Parameters
    are state, not outcome.
    """
    taken = set.intersection(*(set(run.records) for run in runs)) if runs else set()
    names = sorted(name for name in taken | {GRAD} if name != INPUTS and not name.startswith("parameters."))
    return [tuple(run.records.get(name) for name in names) for run in runs]


def whole_keys(runs: Sequence[RunColumns]) -> list[Hashable]:
    """For each run a key of everything in it, call by call in order of execution."""
    return list(zip(map(columns_key, runs), record_keys(runs), strict=True))


def group(runs: Sequence[RunColumns]) -> list[RunClass]:
    """Classes of equal runs, the reference first: the most common one, the earliest where several are."""
    members: dict[Hashable, list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault(columns_key(run), []).append(index)
    classes = [RunClass(runs[indices[0]], tuple(indices)) for indices in members.values()]
    return reference_first(classes)


def reference_first(classes: Iterable[RunClass]) -> list[RunClass]:
    """Classes by their first run, with the heaviest (the earliest of several) moved to the front."""
    ordered = sorted(classes, key=lambda item: item.members[0])
    if ordered:
        ordered.insert(0, ordered.pop(ordered.index(max(ordered, key=lambda item: item.weight))))
    return ordered


def differing(keys: Iterable[Hashable]) -> int:
    """How many differ from the most common one."""
    counts = Counter(keys)
    return counts.total() - max(counts.values(), default=0)


def is_within(path: str, container: str) -> bool:
    """Whether a module path is the container's own or lies below it; the root's path is empty."""
    return not container or path == container or path.startswith(container + ".")
