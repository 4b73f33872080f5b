"""From the nodes found to the report's origins: which part, which sites, which rows, how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from detaudit.compare.align import Aligned
from detaudit.compare.classes import is_within
from detaudit.compare.numbers import values_equal
from detaudit.compare.sources import outcome
from detaudit.compare.state import CarriedState, differing_sites
from detaudit.core.recording import SCALAR_PREFIX, TraceView
from detaudit.core.records import Origin

ROWS_LISTED = 4096
NOT_CAPTURED = "no capture pass has measured it"
_PERHAPS = "perhaps "
_REMEMBERED = "own state that already differed on entry"
_INPUT_SITES = ("args", "kwargs", "rng", "inputs", "grad", "buffer.", "attr.")


@dataclass(frozen=True, slots=True)
class Gaps:
    """What the recording could not see. ``excluded``: module paths; ``unobserved``: (module path, site)."""

    excluded: Sequence[str]
    unobserved: Sequence[tuple[str, str]]

    def excluded_within(self, module: str) -> bool:
        return any(path != module and is_within(path, module) for path in self.excluded)

    def outputs_within(self, module: str) -> list[str]:
        """Modules inside ``module`` some of whose outputs were not observed."""
        found = (p for p, site in self.unobserved if not site.startswith(_INPUT_SITES))
        return sorted({path for path in found if path != module and is_within(path, module)})

    def inputs_of(self, module: str) -> list[str]:
        return sorted({s for path, s in self.unobserved if path == module and s.startswith(_INPUT_SITES)})


def describe(
    view: TraceView,
    aligned: Aligned,
    nodes: Sequence[int],
    groups: Mapping[int, list[list[int]]],
    carried: Mapping[int, CarriedState],
    gaps: Gaps,
) -> list[Origin]:
    """One origin per module, told by the first of its calls; in order of execution.

    Args:
        nodes: the origins, ascending. ``groups``: of each that is a source, the classes with equal inputs and
            different outputs. ``carried``: those whose own state was carried over.
    """
    calls = Counter(aligned.module[node] for node in nodes)
    first: dict[int, int] = {}
    for node in nodes:
        first.setdefault(aligned.module[node], node)
    return [
        _origin(view, aligned, node, groups.get(node, []), carried.get(node), gaps, calls[module])
        for module, node in first.items()
    ]


def _origin(
    view: TraceView,
    aligned: Aligned,
    node: int,
    groups: list[list[int]],
    carried: CarriedState | None,
    gaps: Gaps,
    calls: int,
) -> Origin:
    info = view.modules[aligned.module[node]]
    if carried is not None:
        groups = [aligned.present(node)]
    part, after, mechanism = _part(view, aligned, node, groups, gaps)
    if carried is not None and carried.causes:
        part, after = "module", None
        mechanism = differed_on_entry(carried.causes)
    sites, pairs = _sites(view, aligned, node, groups)
    rows, rows_total = _rows(view, pairs)
    return Origin(
        module=info.path,
        cls=info.cls,
        call=aligned.ordinal(node),
        part=part,
        after=after,
        sites=sites or (carried.sites if carried else ("error",)),
        runs_differing=sum(_runs_differing(aligned, node, group) for group in groups),
        rows=rows[:ROWS_LISTED],
        rows_differing=len(rows),
        rows_total=rows_total,
        value_equal=_value_equal(view, aligned, node, groups),
        numbers_reason=NOT_CAPTURED,
        mechanism=mechanism,
        calls=calls,
    )


def differed_on_entry(sites: Iterable[str], *, perhaps: bool = False) -> str:
    """The mechanism of an origin whose module remembers; ``perhaps`` if it may have nothing to do with it."""
    return f"{_PERHAPS if perhaps else ''}{_REMEMBERED}: {', '.join(sorted(sites))}"


def is_guess(origin: Origin) -> bool:
    """Whether its mechanism gives way to one that was seen at work."""
    return (origin.mechanism or "").startswith(_PERHAPS)


def remembers(origin: Origin) -> bool:
    """Whether what its module remembers is the cause."""
    return (origin.mechanism or "").startswith(_REMEMBERED)


def _part(
    view: TraceView, aligned: Aligned, node: int, groups: list[list[int]], gaps: Gaps
) -> tuple[Literal["module", "own-code"], str | None, str | None]:
    path = view.modules[aligned.module[node]].path
    children = aligned.children(node)
    unobserved = gaps.outputs_within(path)
    if unobserved:
        return "module", None, f"own code or children with unobserved outputs: {', '.join(unobserved)}"
    unseen = gaps.inputs_of(path)
    mechanism = f"some inputs were not observed: {', '.join(unseen)}" if unseen else None
    if gaps.excluded_within(path):
        mechanism = "own code or excluded children"
    elif not children:
        return "module", None, mechanism
    agreeing = None
    for child in children:
        if not all(_agree(aligned, child, group) for group in groups):
            break
        agreeing = view.modules[aligned.module[child]].path
    return "own-code", agreeing, mechanism


def _agree(aligned: Aligned, node: int, classes: Sequence[int]) -> bool:
    """Whether the classes entered and left a node with the same (and all have it)."""
    columns = (aligned.args, aligned.state, aligned.out, aligned.flags)
    return len({tuple(column[k][node] for column in columns) for k in classes}) == 1


def _reference(aligned: Aligned, node: int, group: Sequence[int]) -> tuple[int, int]:
    """The most common outcome of a group; of several, the earliest."""
    weights: Counter[tuple[int, int]] = Counter()
    for k in sorted(group, key=lambda k: aligned.classes[k].members[0]):
        weights[outcome(aligned, k, node)] += aligned.classes[k].weight
    return weights.most_common(1)[0][0]


def _runs_differing(aligned: Aligned, node: int, group: Sequence[int]) -> int:
    reference = _reference(aligned, node, group)
    return sum(aligned.classes[k].weight for k in group if outcome(aligned, k, node) != reference)


def _sites(
    view: TraceView, aligned: Aligned, node: int, groups: list[list[int]]
) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """The output sites that differ, and for the first of them (reference, other) pairs of value ids."""
    records = [
        (_reference(aligned, node, group)[0], list(dict.fromkeys(aligned.out[k][node] for k in group)))
        for group in groups
    ]
    sites = sorted({s for _, group in records for s in differing_sites(view, group)})
    pairs = []
    for reference, others in records if sites else ():
        base = dict(view.record(reference)).get(sites[0])
        values = dict.fromkeys(dict(view.record(other)).get(sites[0]) for other in others)
        pairs += [(base, v) for v in values if base is not None and v is not None and v != base]
    return tuple(sites), pairs


def _rows(view: TraceView, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], int | None]:
    """Rows that differ from the reference in any run, as far as they are known, and how many there are."""
    rows: set[int] = set()
    for base, other in pairs:
        rows.update(view.rows_differing(base, other) or ())
    value = view.value(pairs[0][0]) if pairs else None
    if value is None or value.dtype.startswith(SCALAR_PREFIX):
        return (), None
    return tuple(sorted(rows)), prod(value.shape[:-1])


def _value_equal(view: TraceView, aligned: Aligned, node: int, groups: list[list[int]]) -> bool | None:
    """Whether all outputs are equal as numbers though not as bits; ``None`` where the bytes were not kept."""
    answers: list[bool | None] = []
    for group in groups:
        outcomes = dict.fromkeys(outcome(aligned, k, node) for k in group)
        if len({flag for _, flag in outcomes}) > 1:
            return False
        base, *others = [dict(view.record(record)) for record, _ in outcomes]
        for other in others:
            if base.keys() != other.keys():
                return False
            changed = [(base[s], other[s]) for s in base if base[s] != other[s]]
            answers += [values_equal(view.value(a), view.value(b)) for a, b in changed]
    if False in answers:
        return False
    return True if answers and None not in answers else None
