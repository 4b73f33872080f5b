"""A module's own state on entry: where it came from, and whom it excuses.

State that differs on entry either was carried over from an earlier run (then the call is an origin, history
being its cause), or was written earlier in this run (then it is an input like any other). A container around
such a call was entered with that state too, and is judged only among runs in which it agrees.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from detaudit.compare.align import ABSENT, Aligned
from detaudit.compare.carryover import began_as_ended, began_differently, visits_of
from detaudit.compare.sources import unequal
from detaudit.core.recording import SCALAR_PREFIX, RunColumns, TraceView

RACING = "racing"
"""The entry of a trace's ``meta``: paths of modules in which an operator races on equal operands."""


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A node entered with own state that earlier runs left behind, and the sites of that state.

    ``causes``: those that can be why it differs, which tensors of a module that itself races are not: what
    its earlier calls left there differed already.
    """

    node: int
    sites: tuple[str, ...]
    causes: tuple[str, ...]

    @classmethod
    def of(cls, view: TraceView, aligned: Aligned, node: int, sites: Sequence[str]) -> CarriedState:
        if not races(view, view.modules[aligned.module[node]].path):
            return cls(node, tuple(sites), tuple(sites))
        every = cls(node, tuple(sites), ())
        return cls(node, tuple(sites), every.scalars(view, aligned))

    def scalars(self, view: TraceView, aligned: Aligned) -> tuple[str, ...]:
        """Those of the sites at which host scalars are."""
        contents = [dict(view.record(aligned.state[k][self.node])) for k in aligned.present(self.node)]
        return tuple(
            site for site in self.sites if all(_is_scalar(view, held.get(site)) for held in contents)
        )


def races(view: TraceView, path: str) -> bool:
    """Whether an operator of the module was seen to race on equal operands."""
    racing = view.meta.get(RACING)
    return isinstance(racing, (list, tuple)) and path in racing


@dataclass(frozen=True, slots=True)
class HiddenState:
    """State of a module that no call recorded: parameters, and buffers too large to digest at every call.

    ``nodes``: the calls that may have found it different, and all calls around them that began no earlier.
    ``keys``: one per class; equal where the state is known to agree. ``changed``: its sites, where it differs
    at the end of runs and is not known to differ at their start.
    """

    nodes: Collection[int]
    keys: tuple[Hashable, ...]
    changed: tuple[str, ...] = ()


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
    Code outside of any call may still have written it earlier in the run. So it takes proof, site by site, or
    that nothing at all differs before the call and nothing disproves it.

    Args:
        runs: all recorded runs, of every condition.
    """
    found = []
    differences = Differences(aligned)
    for node in _first_calls(aligned, differing):
        visits = visits_of(view, runs, aligned.module[node])
        is_first = not differences.before_state(node)
        sites = tuple(
            site
            for site in differing_sites(view, [aligned.state[k][node] for k in aligned.present(node)])
            if began_as_ended(visits, site) or (is_first and not began_differently(visits, site))
        )
        if sites:
            found.append(CarriedState.of(view, aligned, node, sites))
    return found


def differing_sites(view: TraceView, records: Iterable[int]) -> tuple[str, ...]:
    """Sites at which the records are not all the same, or which some of them lack; sorted."""
    contents = [dict(view.record(record)) for record in dict.fromkeys(records)]
    sites = sorted({site for content in contents for site in content})
    return tuple(s for s in sites if len({content.get(s, ABSENT) for content in contents}) > 1)


def _is_scalar(view: TraceView, value: int | None) -> bool:
    return value is None or view.value(value).dtype.startswith(SCALAR_PREFIX)


class Differences:
    """Whether anything recorded up to a node's entry differs between runs."""

    def __init__(self, aligned: Aligned) -> None:
        self._aligned = aligned
        size = len(aligned.module)
        parted = min((parting.split for parting in aligned.partings), default=size)
        self._args = min(next(iter(unequal(aligned.args)), size), parted)
        self._state = next(iter(unequal(aligned.state)), size)
        self._ended = list(takewhile(min(self._args, self._state).__gt__, unequal(aligned.out)))

    def before_state(self, node: int) -> bool:
        """Whether anything beside the node's own state differs when it is entered."""
        return self._args <= node or self._state < node or self._in_ended(node)

    def on_entry(self, node: int) -> bool:
        """Whether anything differs when the node is entered."""
        return self._args <= node or self._state <= node or self._in_ended(node)

    def _in_ended(self, node: int) -> bool:
        open_calls = set(self._aligned.ancestors(node))
        return any(n < node and n not in open_calls for n in self._ended[: len(open_calls) + 1])


class EntryState:
    """For nodes to be judged: what they were entered with beyond arguments and own state.

    State of modules inside counts where it was carried over, or may have been written before the node: a
    container that itself writes state into its children is still accused of what it writes.
    """

    def __init__(
        self,
        aligned: Aligned,
        judged: Collection[int],
        differing: Sequence[int],
        carried: Collection[int],
        hidden: Sequence[HiddenState],
    ) -> None:
        self._aligned = aligned
        self._hidden = hidden
        self._inner: dict[int, list[int]] = {}
        differences = Differences(aligned)
        inner = _inner_state(aligned, judged, differing) if judged and differing else {}
        for container, nodes in inner.items():
            earlier = differences.on_entry(container)
            self._inner[container] = [node for node in nodes if earlier or node in carried]

    def __call__(self, node: int) -> Sequence[Hashable]:
        hidden = [item for item in self._hidden if node in item.nodes]
        inner = self._inner.get(node, ())
        return [
            (tuple(self._aligned.state[k][n] for n in inner), tuple(item.keys[k] for item in hidden))
            for k in range(len(self._aligned.classes))
        ]


def _first_calls(aligned: Aligned, nodes: Sequence[int]) -> list[int]:
    """Those of the nodes that are their module's first call in every run that has them."""
    if not nodes:
        return []
    size = len(aligned.module)
    first = dict(zip(reversed(aligned.module), range(size - 1, -1, -1), strict=True))
    return [n for n in nodes if first[aligned.module[n]] == n and _is_first(aligned, n)]


def _is_first(aligned: Aligned, node: int) -> bool:
    module = aligned.module[node]
    return all(
        aligned.classes[k].run.module.index(module) == aligned.call(k, node) for k in aligned.present(node)
    )


def _inner_state(
    aligned: Aligned, judged: Collection[int], differing: Sequence[int]
) -> Mapping[int, Sequence[int]]:
    """For each judged node, the calls inside it that are their module's first there and differ in state."""
    inner: dict[int, list[int]] = {}
    for node in differing:
        for container in aligned.ancestors(node):
            if container in judged and _is_first_within(aligned, node, container):
                inner.setdefault(container, []).append(node)
    return inner


def _is_first_within(aligned: Aligned, node: int, container: int) -> bool:
    """Whether in any run the node is the first call of its module inside the container."""
    module = aligned.module[node]
    for k in aligned.present(node):
        since = aligned.call(k, container) + 1
        if aligned.classes[k].run.module.index(module, since) == aligned.call(k, node):
            return True
    return False
