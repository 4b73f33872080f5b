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
    """What the comparison of some runs found.

    Args:
        nodes: all origins, at least one per ``origins``.
        changed: the first call that differs for equal arguments while what it holds differs by the end of
            runs, and the sites of that; None where there is none.
    """

    runs: Sequence[RunColumns]
    aligned: Aligned
    nodes: Sequence[int] = ()
    carried: tuple[state.CarriedState, ...] = ()
    origins: tuple[Origin, ...] = ()
    changed: tuple[int, Sequence[str]] | None = None

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
    changed = _changed(aligned, candidates, unrecorded)
    return Located(runs, aligned, nodes, tuple(carried.values()), tuple(found), changed)


def _changed(
    aligned: Aligned, candidates: Sequence[int], unrecorded: Sequence[state.HiddenState]
) -> tuple[int, Sequence[str]] | None:
    held = {n: [s for item in unrecorded if n in item.nodes for s in item.changed] for n in candidates}
    sources_of_it = {node for node, sites in held.items() if sites and sources.groups(aligned, node)}
    first = min(sources.innermost(aligned, sources_of_it), default=None)
    return None if first is None else (first, list(dict.fromkeys(held[first])))
