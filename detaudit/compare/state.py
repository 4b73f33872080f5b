"""A module's own state on entry: where it came from, and whom it excuses.

State that differs on entry either was carried over from an earlier run (then the call is an origin, history
being its cause), or was written earlier in this run (then it is an input like any other). A container that
holds such a call was entered with that state too, and is judged only among runs in which it agrees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice

from detaudit.compare.align import ABSENT, Aligned
from detaudit.compare.sources import unequal
from detaudit.core.recording import RunColumns, TraceView


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A node entered with own state that earlier runs left behind, and the sites of that state."""

    node: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HiddenState:
    """State of a module that no call recorded: parameters, and buffers too large to digest at every call.

    ``since``: the node from whose successor on it may differ; -1 where it differed before the run began.
    ``keys``: one per class; equal where the state is known to agree.
    """

    module: str
    since: int
    keys: tuple[Hashable, ...]


def differing_state(aligned: Aligned) -> list[int]:
    """Nodes entered with different own state, ascending."""
    nodes = unequal(aligned.state)
    if not aligned.partial:
        return list(nodes)
    return [n for n in nodes if len({column[n] for column in aligned.state} - {ABSENT}) > 1]


def carried_state(
    view: TraceView, aligned: Aligned, differing: Sequence[int], runs: Sequence[RunColumns]
) -> list[CarriedState]:
    """Nodes whose state on entry differs and was not written earlier in the run.

    Only a module's first call in a run qualifies: what a later one finds may have been written in between.
    Where something that differs came before it, code outside of any call may have written the state from
    that; then it takes the previous run of the same process, ending with the very value, to show that not.
    """
    found = []
    for node in _first_calls(aligned, differing):
        sites = differing_sites(view, [aligned.state[k][node] for k in aligned.present(node)])
        if _carried(view, runs, aligned.module[node], sites) or not _difference_before(aligned, node):
            found.append(CarriedState(node, sites))
    return found


def differing_sites(view: TraceView, records: Iterable[int]) -> tuple[str, ...]:
    """Sites at which the records are not all the same, or which some of them lack; sorted."""
    contents = [dict(view.record(record)) for record in dict.fromkeys(records)]
    sites = sorted({site for content in contents for site in content})
    return tuple(s for s in sites if len({content.get(s, ABSENT) for content in contents}) > 1)


class EntryState:
    """For nodes to be judged: what they were entered with beyond arguments and own state."""

    def __init__(
        self,
        view: TraceView,
        aligned: Aligned,
        judged: Collection[int],
        differing: Sequence[int],
        hidden: Sequence[HiddenState],
    ) -> None:
        self._view = view
        self._aligned = aligned
        self._hidden = hidden
        self._inner = _inner_state(aligned, judged, differing) if judged and differing else {}

    def __call__(self, node: int) -> Sequence[Hashable]:
        path = self._view.modules[self._aligned.module[node]].path
        hidden = [h for h in self._hidden if node > h.since and is_within(h.module, path)]
        inner = self._inner.get(node, ())
        return [
            (tuple(self._aligned.state[k][n] for n in inner), tuple(h.keys[k] for h in hidden))
            for k in range(len(self._aligned.classes))
        ]


def is_within(path: str, container: str) -> bool:
    """Whether a module path is the container's own or lies below it; the root's path is empty."""
    return not container or path == container or path.startswith(container + ".")


def _first_calls(aligned: Aligned, nodes: Sequence[int]) -> list[int]:
    """Those of the nodes that are their module's first call in every run that has them."""
    if not nodes:
        return []
    size = len(aligned.module)
    first = dict(zip(reversed(aligned.module), range(size - 1, -1, -1), strict=True))
    return [n for n in nodes if first[aligned.module[n]] == n and _is_first(aligned, n)]


def _is_first(aligned: Aligned, node: int) -> bool:
    module = aligned.module[node]
    for k in aligned.present(node):
        calls = aligned.calls[k]
        if calls is not None and aligned.classes[k].run.module.index(module) != calls[node]:
            return False
    return True


def _carried(view: TraceView, runs: Sequence[RunColumns], module: int, sites: Sequence[str]) -> bool:
    """Whether every run began with what the run just before it, in the same process, had ended with."""
    changed = False
    by_place = {(run.process, run.position): run for run in runs}
    for run in runs:
        before = by_place.get((run.process, run.position - 1))
        if before is None or module not in before.module or module not in run.module:
            continue
        began, last_began = _entry(view, run, module), _entry(view, before, module)
        ended = _exit(view, before, module)
        if any(began.get(site) != ended.get(site) for site in sites):
            return False
        changed = changed or any(began.get(site) != last_began.get(site) for site in sites)
    return changed


def _entry(view: TraceView, run: RunColumns, module: int) -> Mapping[str, int]:
    return dict(view.record(run.state[run.module.index(module)]))


def _exit(view: TraceView, run: RunColumns, module: int) -> Mapping[str, int]:
    last = len(run.module) - 1 - run.module[::-1].index(module)
    return dict(view.record(run.state[last])) | dict(view.record(run.out[last]))


def _difference_before(aligned: Aligned, node: int) -> bool:
    """Whether anything recorded before the node was entered differs between runs."""
    if next(iter(unequal(aligned.args)), node) < node or next(iter(unequal(aligned.state)), node) < node:
        return True
    open_calls = set(aligned.ancestors(node))
    ended = islice(unequal(aligned.out), len(open_calls) + 1)
    return any(other < node and other not in open_calls for other in ended)


def _inner_state(
    aligned: Aligned, judged: Collection[int], differing: Sequence[int]
) -> Mapping[int, Sequence[int]]:
    """For each judged node, the calls inside it that are their module's first there and differ in state."""
    modules = {aligned.module[node] for node in differing}
    calls_of: dict[int, list[int]] = {module: [] for module in modules}
    for node in compress(count(), map(modules.__contains__, aligned.module)):
        calls_of[aligned.module[node]].append(node)
    inner: dict[int, list[int]] = {}
    for node in differing:
        calls = calls_of[aligned.module[node]]
        for container in aligned.ancestors(node):
            if container in judged and calls[bisect_right(calls, container)] == node:
                inner.setdefault(container, []).append(node)
    return inner
