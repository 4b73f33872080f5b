"""State that is recorded once a run and not at every call: parameters, and buffers and caches over 64 MiB."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import compress, count

from detaudit.compare.align import ABSENT, Aligned
from detaudit.compare.classes import is_within
from detaudit.compare.state import CarriedState, HiddenState, differing_sites
from detaudit.core.recording import RunColumns, TraceView

BEFORE, AFTER = "parameters.before", "parameters.after"
LARGE_START, LARGE_END = "large.start", "large.end"


def hidden_state(view: TraceView, aligned: Aligned, runs: Sequence[RunColumns]) -> list[HiddenState]:
    """State that may have differed between runs while nothing that was recorded at the calls shows it.

    Where it differs at the end of a run only, a module's first call still found it as it was at the start.
    """
    found = []
    for name, from_start in ((LARGE_START, True), (BEFORE, True), (LARGE_END, False), (AFTER, False)):
        records = [run.records.get(name) for run in runs]
        if None in records:
            continue
        contents = [dict(view.record(record)) for record in records if record is not None]
        sites = differing_sites(view, [record for record in records if record is not None])
        for owner, owned in _by_owner(view, sites).items():
            values = [tuple(content.get(site, ABSENT) for site in owned) for content in contents]
            keys = tuple(frozenset(values[m] for m in item.members) for item in aligned.classes)
            nodes = _exposed(aligned, _calls(view, aligned, owner), from_start)
            found.append(HiddenState(nodes, _told_apart(keys), () if from_start else tuple(owned)))
    return found


def carried_hidden_state(view: TraceView, aligned: Aligned, runs: Sequence[RunColumns]) -> list[CarriedState]:
    """First calls of modules whose parameters or large state differ before the run, in one process.

    Fresh processes that begin with other parameters were built differently; no run left that behind.
    """
    if len({run.process for run in runs}) > 1:
        return []
    found = []
    for name in (LARGE_START, BEFORE):
        records = [run.records[name] for run in runs if name in run.records]
        for owner, sites in _by_owner(view, differing_sites(view, records)).items():
            node = next(iter(_calls(view, aligned, owner)), None)
            if node is not None:
                found.append(CarriedState.of(view, aligned, node, sites))
    return found


def parameters_differ(view: TraceView, runs: Sequence[RunColumns]) -> bool:
    """Whether fresh processes began or ended with different parameters. Within one process that is drift."""
    if len({run.process for run in runs}) < 2:
        return False
    return any(
        differing_sites(view, [run.records[name] for run in runs if name in run.records])
        for name in (BEFORE, AFTER)
    )


def _by_owner(view: TraceView, sites: Iterable[str]) -> Mapping[str, list[str]]:
    """Sites by the path of the module they belong to: ``a.b:buffer.cache``, ``a.b.weight``."""
    paths = {path for module in view.modules for path in (module.path, *module.aliases)}
    owners: dict[str, list[str]] = {}
    for site in sites:
        owner, colon, _ = site.partition(":")
        while not colon and owner and owner not in paths:
            owner = owner.rpartition(".")[0]
        owners.setdefault(owner, []).append(site)
    return owners


def _calls(view: TraceView, aligned: Aligned, path: str) -> Sequence[int]:
    """Calls of a module; where it is never called itself (a list of modules), of those inside it."""
    modules = enumerate(view.modules)
    own = {index for index, module in modules if path in (module.path, *module.aliases)}
    calls = list(compress(count(), map(own.__contains__, aligned.module)))
    if calls:
        return calls
    inside = {index for index, module in enumerate(view.modules) if is_within(module.path, path)}
    return list(compress(count(), map(inside.__contains__, aligned.module)))


def _exposed(aligned: Aligned, calls: Iterable[int], from_start: bool) -> set[int]:
    """The calls but for the first, and the calls around them that began after the first; or simply all."""
    exposed: set[int] = set()
    first: int | None = -1 if from_start else None
    for call in calls:
        if first is None:
            first = call
            continue
        for node in (call, *aligned.ancestors(call)):
            if node <= first or node in exposed:
                break
            exposed.add(node)
    return exposed


def _told_apart(keys: Sequence[frozenset[Hashable]]) -> tuple[Hashable, ...]:
    """A class whose own runs disagree agrees with no other class."""
    return tuple(key if len(key) == 1 else (key, index) for index, key in enumerate(keys))
