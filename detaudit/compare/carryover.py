"""Evidence that state which a module finds on entry was left behind by an earlier run of the process.

The alternative is that the run itself wrote it, in code between the recorded calls: then the value follows
from whatever that code computed, and the call that finds it must not be accused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from detaudit.core.recording import RunColumns, TraceView


@dataclass(frozen=True, slots=True)
class Visit:
    """A module's state (site to value id) when a run first called it, and when its last call had ended."""

    process: int
    position: int
    entry: Mapping[str, int]
    exit: Mapping[str, int]


def visits_of(view: TraceView, runs: Sequence[RunColumns], module: int) -> list[Visit]:
    """One visit per run that calls the module."""
    return list(_visits(view, runs, module))


def _visits(view: TraceView, runs: Sequence[RunColumns], module: int) -> Iterator[Visit]:
    for run in runs:
        if module not in run.module:
            continue
        entry = dict(view.record(run.state[run.module.index(module)]))
        last = len(run.module) - 1 - run.module[::-1].index(module)
        ended = dict(view.record(run.state[last])) | dict(view.record(run.out[last]))
        yield Visit(run.process, run.position, entry, ended)


def began_as_ended(visits: Sequence[Visit], site: str) -> bool:
    """Proof: every run began with what the run just before it had ended with, and not always the same."""
    by_place = {(visit.process, visit.position): visit for visit in visits}
    pairs = [
        (by_place[visit.process, visit.position - 1], visit)
        for visit in visits
        if (visit.process, visit.position - 1) in by_place
    ]
    if any(before.exit.get(site) != after.entry.get(site) for before, after in pairs):
        return False
    return any(before.entry.get(site) != after.entry.get(site) for before, after in pairs)


def began_differently(visits: Sequence[Visit], site: str) -> bool:
    """Disproof: even the first runs of the processes differ, so no earlier run is to blame."""
    repeated = {visit.process for visit in visits if visit.position > 0}
    first = [visit.entry.get(site) for visit in visits if visit.position == 0 and visit.process in repeated]
    return len(set(first)) > 1
