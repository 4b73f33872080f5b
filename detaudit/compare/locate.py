"""All steps from a set of comparable runs to the origins in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from detaudit.compare import handed, hidden, origins, sources, state
from detaudit.compare.align import Aligned, align
from detaudit.compare.classes import group
from detaudit.compare.origins import Gaps
from detaudit.core.recording import RunColumns, TraceView
from detaudit.core.records import Origin


@dataclass(frozen=True, slots=True)
class Located:
    """What the comparison of some runs found. ``nodes``: all origins, at least one per ``origins``."""

    runs: Sequence[RunColumns]
    aligned: Aligned
    nodes: Sequence[int] = ()
    carried: tuple[state.CarriedState, ...] = ()
    origins: tuple[Origin, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether any call differs between any two runs."""
        return len(self.aligned.classes) > 1


def locate(
    view: TraceView, runs: Sequence[RunColumns], gaps: Gaps, process_runs: Sequence[RunColumns]
) -> Located:
    """Compare runs on identical inputs.

    Args:
        runs: those to compare. ``process_runs``: all recorded runs, by which carried-over state is told.
    """
    aligned = align(view, group(runs))
    if len(aligned.classes) < 2:
        return Located(runs, aligned)
    differing = state.differing_state(aligned)
    carried = {item.node: item for item in hidden.carried_hidden_state(view, aligned, runs)}
    carried |= {item.node: item for item in state.carried_state(view, aligned, differing, process_runs)}
    candidates = sources.candidates(aligned)
    unrecorded = hidden.hidden_state(view, aligned, runs)
    entered = state.EntryState(aligned, set(candidates), differing, carried, unrecorded)
    strict = bool(differing or unrecorded)
    groups = {n: sources.groups(aligned, n, entered(n) if strict else None) for n in candidates}
    excused = handed.excused(view, aligned, runs)
    groups = {node: found for node, found in groups.items() if found and node not in excused}
    nodes = sources.innermost(aligned, groups.keys() | carried.keys())
    found = origins.describe(view, aligned, nodes, groups, carried, gaps)
    return Located(runs, aligned, nodes, tuple(carried.values()), tuple(found))
