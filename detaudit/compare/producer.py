"""Differences that no call can be accused of: the first call they show at, and generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress, count, repeat
from operator import and_, ne

from detaudit.compare.align import ABSENT, Aligned
from detaudit.compare.classes import FINAL, GRAD
from detaudit.compare.locate import Located
from detaudit.compare.sources import outcome, unequal
from detaudit.compare.state import differing_sites
from detaudit.core.recording import TraceView
from detaudit.core.records import Finding

_GENERATOR = "rng."


def unobserved_producer(view: TraceView, located: Located) -> Finding | None:
    """The finding for the first call that was entered differently, unless an origin comes before it."""
    aligned = located.aligned
    carried = {item.node for item in located.carried}
    node = min(chain(_first(aligned.args), _first(aligned.state)), default=None)
    explained = node is not None and any(n < node or (n == node and n in carried) for n in located.nodes)
    if explained or (node is None and located.nodes):
        return None
    if located.changed is not None and (node is None or located.changed[0] < node):
        return _changed_between_calls(view, located, *located.changed)
    if node is None:
        return _after_last_call(view, located)
    within = aligned.parent[node]
    place = f"in the code of {_name(view, aligned, within)}" if within >= 0 else "outside of all modules"
    return Finding(
        "unobserved-producer",
        _path(view, aligned, within) if within >= 0 else None,
        f"no recorded call explains the difference: {_last_agreeing(view, aligned, node)}, then "
        f"{_name(view, aligned, node)} {_entered(view, aligned, node)}; what differs was made between the "
        f"two, {place} or where nothing is recorded",
    )


def consumed_generator(view: TraceView, aligned: Aligned) -> Finding | None:
    """The finding where two runs drew differently from a generator although their arguments agreed."""
    for k in range(1, len(aligned.classes)):
        nodes = _shared_nodes(aligned, k)
        position = _diverging(view, aligned, k, nodes)
        if position is None:
            continue
        node = nodes[position]
        sites = differing_sites(view, (aligned.args[0][node], aligned.args[k][node]))
        if not all(site.startswith(_GENERATOR) for site in sites):
            continue
        names = ", ".join(site.removeprefix(_GENERATOR) for site in sites)
        entered = _name(view, aligned, node)
        if position == 0:
            message = f"generator state ({names}) already differs on entry to the first call, {entered}"
            return Finding("rng-consumed", None, f"{message}: it was not put back, or was drawn from before")
        before = nodes[position - 1]
        return Finding(
            "rng-consumed",
            _path(view, aligned, before),
            f"generator state ({names}) agrees on entry to {_name(view, aligned, before)} and differs on "
            f"entry to {entered}, whose arguments agree: in between, runs drew random numbers differently",
        )
    return None


def _diverging(view: TraceView, aligned: Aligned, k: int, nodes: Sequence[int]) -> int | None:
    """Position of a node whose generator state differs from the reference's while its predecessor's agrees.

    Bisection: a generator that has diverged stays so until it is seeded again, so this is the first one
    unless the run seeds; it is a true divergence in any case.
    """

    def agrees(position: int) -> bool:
        node = nodes[position]
        a, b = aligned.args[0][node], aligned.args[k][node]
        return a == b or _generators(view, a) == _generators(view, b)

    if not nodes or agrees(len(nodes) - 1):
        return None
    low, high = -1, len(nodes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if agrees(middle) else (low, middle)
    return high


def _shared_nodes(aligned: Aligned, k: int) -> Sequence[int]:
    """Nodes that both the reference and class ``k`` have, in order of execution."""
    size = len(aligned.module)
    if aligned.calls[0] is None and aligned.calls[k] is None:
        return range(size)
    both = map(and_, *(map(ne, aligned.args[i], repeat(ABSENT)) for i in (0, k)))
    return list(compress(count(), both))


def _generators(view: TraceView, record: int) -> Mapping[str, int]:
    return {site: value for site, value in view.record(record) if site.startswith(_GENERATOR)}


def _first(columns: Sequence[Sequence[int]]) -> Sequence[int]:
    return [node for node, _ in zip(unequal(columns), range(1), strict=False)]


def _after_last_call(view: TraceView, located: Located) -> Finding:
    aligned = located.aligned
    if len(aligned.module) == 0:
        place = "no module was called"
    else:
        place = f"all calls agree, the last being {_name(view, aligned, len(aligned.module) - 1)}"
    records = [run.records for run in located.runs]
    sites = [
        site
        for name in (FINAL, GRAD)
        for site in differing_sites(view, [record[name] for record in records if name in record])
    ]
    what = f"what differs ({', '.join(sites[:4])})" if sites else "what differs"
    message = f"no recorded call explains the difference: {place}; {what} was made outside of all modules"
    return Finding("unobserved-producer", None, message)


def _changed_between_calls(view: TraceView, located: Located, node: int, sites: Sequence[str]) -> Finding:
    gradients = [run.records[GRAD] for run in located.runs if GRAD in run.records]
    of_these = {f"grad.{site}" for site in sites}
    names = [*sites, *(site for site in differing_sites(view, gradients) if site in of_these)]
    return Finding(
        "unobserved-producer",
        None,
        f"no recorded call explains the difference: {_name(view, located.aligned, node)} is the first to "
        "give different outputs for equal arguments, and what it holds differs at the end of the run "
        f"({', '.join(names[:4])}), which may have been made different before this call where nothing is "
        "recorded, such as in a backward pass or an optimizer's step",
    )


def _last_agreeing(view: TraceView, aligned: Aligned, node: int) -> str:
    """The last call that ended before the node was entered, and agrees; else the call that is still open."""
    open_calls = set(aligned.ancestors(node))
    for other in range(node - 1, -1, -1):
        if other in open_calls:
            return f"{_name(view, aligned, other)} was entered with the same inputs"
        present = aligned.present(other)
        if len(present) == len(aligned.classes) and len({outcome(aligned, k, other) for k in present}) == 1:
            return f"{_name(view, aligned, other)} agrees"
    return "nothing was recorded before"


def _entered(view: TraceView, aligned: Aligned, node: int) -> str:
    present = aligned.present(node)
    if len(present) < len(aligned.classes):
        return "is called in some runs only"
    sites = differing_sites(view, [aligned.args[k][node] for k in present])
    if sites:
        return f"is handed different inputs ({', '.join(sites[:4])})"
    sites = differing_sites(view, [aligned.state[k][node] for k in present])
    return f"finds different state of its own ({', '.join(sites[:4])})"


def _path(view: TraceView, aligned: Aligned, node: int) -> str:
    return view.modules[aligned.module[node]].path


def _name(view: TraceView, aligned: Aligned, node: int) -> str:
    info = view.modules[aligned.module[node]]
    return f"{info.path or f'the root ({info.cls})'} (call {aligned.ordinal(node)})"
