"""Evidence that state which a module finds on entry was left behind by an earlier run of the process.

The alternative is that the run itself wrote it, in code between the recorded calls: then the value follows
from whatever that code computed, and the call that finds it must not be accused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from detaudit.core.recording import HISTORY, RunColumns, TraceView

MIN_LATER_RUNS = 3
"""So many runs must all have moved away from the state of a fresh process before that counts."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A module's state (site to value id) when a run first called it, and when its last call had ended."""

    condition: str
    process: int
    position: int
    entry: Mapping[str, int]
    exit: Mapping[str, int]


def visits_of(view: TraceView, runs: Sequence[RunColumns], module: int) -> list[Visit]:
    """One visit per run that calls the module."""
    return list(_visits(view, runs, module))


def was_carried(visits: Sequence[Visit], site: str) -> bool | None:
    """True if the state at a site came from earlier runs, False if from the run itself, None if unknown."""
    if _began_as_ended(visits, site) or _same_in_sequence(visits, site):
        return True
    return _left_fresh_state(visits, site)


def _visits(view: TraceView, runs: Sequence[RunColumns], module: int) -> Iterator[Visit]:
    for run in runs:
        if module not in run.module:
            continue
        entry = dict(view.record(run.state[run.module.index(module)]))
        last = len(run.module) - 1 - run.module[::-1].index(module)
        ended = dict(view.record(run.state[last])) | dict(view.record(run.out[last]))
        yield Visit(run.condition, run.process, run.position, entry, ended)


def _began_as_ended(visits: Sequence[Visit], site: str) -> bool:
    """Every run began with what the run just before it had ended with, and that was not always the same."""
    by_place = {(visit.process, visit.position): visit for visit in visits}
    pairs = [
        (by_place[visit.process, visit.position - 1], visit)
        for visit in visits
        if (visit.process, visit.position - 1) in by_place
    ]
    if any(before.exit.get(site) != after.entry.get(site) for before, after in pairs):
        return False
    return any(before.entry.get(site) != after.entry.get(site) for before, after in pairs)


def _same_in_sequence(visits: Sequence[Visit], site: str) -> bool:
    """Two processes of the history control found the same in run k, for all k, and not always the same."""
    first, second = (
        {v.position: v.entry.get(site) for v in visits if v.condition == name} for name in HISTORY
    )
    return len(set(first.values())) > 1 and first == second


def _left_fresh_state(visits: Sequence[Visit], site: str) -> bool | None:
    """Whether all processes begin alike and every later run finds something else.

    If even the first runs of processes differ, no earlier run is to blame.
    """
    fresh = {visit.entry.get(site) for visit in visits if visit.position == 0}
    later = [visit.entry.get(site) for visit in visits if visit.position > 0]
    processes = len({visit.process for visit in visits if visit.position == 0})
    if processes < 2 or len(later) < MIN_LATER_RUNS:
        return None
    if len(fresh) > 1:
        return False
    return True if fresh.isdisjoint(later) else None
