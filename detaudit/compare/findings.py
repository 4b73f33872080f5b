"""Findings beside the origins. Each function answers one question, in one sentence or not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, count

from detaudit.compare.align import Parting
from detaudit.compare.classes import FINAL, INPUTS
from detaudit.compare.hidden import AFTER, BEFORE
from detaudit.compare.history import History
from detaudit.compare.locate import Located
from detaudit.compare.numbers import has_nan
from detaudit.compare.sources import unequal
from detaudit.compare.state import differing_sites
from detaudit.core.recording import RunColumns, TraceView
from detaudit.core.records import Finding, Origin

_NAMED = 5


def inputs_differ(view: TraceView, runs: Sequence[RunColumns]) -> Finding | None:
    """Whether the target's own inputs differ between runs, so that nothing can be said of the model."""
    records = [run.records[INPUTS] for run in runs if INPUTS in run.records]
    sites = differing_sites(view, records)
    if not sites:
        return None
    return Finding(
        "inputs-differ",
        None,
        f"the inputs differ between runs at {_some(sites)}: {len(set(records))} different inputs in "
        f"{len(records)} runs; make_inputs() has to return the same bits every time",
    )


def control_flow(view: TraceView, located: Located) -> Iterator[Finding]:
    """A different sequence of calls, and calls that raise in some runs only."""
    aligned = located.aligned
    weights: Counter[tuple[int | None, int]] = Counter()
    first: dict[tuple[int | None, int], Parting] = {}
    for parting in aligned.partings:
        place = (parting.module, parting.call)
        weights[place] += parting.weight
        first.setdefault(place, parting)
    for place, parting in first.items():
        path = None if parting.module is None else view.modules[parting.module].path
        where = "outside of all modules" if path is None else f"in {_title(path)} (call {parting.call})"
        yield Finding(
            "control-flow",
            path,
            f"{weights[place]} of {len(located.runs)} runs make other calls than the most common one, first "
            f"{where}: {_next(view, parting.extra)} instead of {_next(view, parting.lacking)}",
        )
    for node in _unequal_errors(located):
        path = view.modules[aligned.module[node]].path
        flags = {view.flags[aligned.flags[k][node]] for k in aligned.present(node)}
        errors = " or ".join(sorted({error for _, error in flags if error is not None}))
        message = f"{_title(path)} (call {aligned.ordinal(node)}) raises {errors} in some runs only"
        yield Finding("control-flow", path, message)


def stateful(view: TraceView, runs: Sequence[RunColumns]) -> Iterator[Finding]:
    """Parameters that a run changed, or that were not the same to begin with."""
    by_process: dict[int, list[RunColumns]] = {}
    for run in runs:
        by_process.setdefault(run.process, []).append(run)
    changed: dict[str, None] = {}
    for group in by_process.values():
        before = next((run.records[BEFORE] for run in group if BEFORE in run.records), None)
        for run in group:
            if before is not None and AFTER in run.records:
                changed |= dict.fromkeys(differing_sites(view, (before, run.records[AFTER])))
    if changed:
        yield Finding("stateful", None, f"running the model changes its parameters: {_some(sorted(changed))}")
    started = differing_sites(view, [run.records[BEFORE] for run in runs if BEFORE in run.records])
    if started:
        yield Finding(
            "stateful", None, f"parameters differ between runs before the first call: {_some(started)}"
        )


def carried_state(view: TraceView, located: Located) -> Iterator[Finding]:
    """Own state that earlier runs left behind."""
    for item in located.carried:
        path = view.modules[located.aligned.module[item.node]].path
        sites = _some(item.causes or item.sites)
        left = "" if item.causes else "; an operator inside races, and may have left it so"
        message = f"own state of {_title(path)} differs on entry, not written in the run: {sites}{left}"
        yield Finding("history-dependent", path, message)


def hidden_state(history: History | None, differs: bool, origins: Sequence[Origin]) -> Finding | None:
    """What the history control shows: the difference comes from state and not from a race."""
    if history is None or not history.hidden_state or not differs:
        return None
    return Finding(
        "history-dependent",
        origins[0].module if origins else None,
        f"two fresh processes that ran the same sequence agree at all {history.positions} positions while "
        "runs differ along it: hidden state (a cache, a counter, a generator, a tuned kernel), not a race",
    )


def first_run_differs(keys: Sequence[object], origins: Sequence[Origin]) -> Finding | None:
    """Only the first of three or more runs differs. ``keys``: one per run, equal for equal runs."""
    if len(keys) < 3 or keys[0] == keys[1] or len(set(keys[1:])) > 1:
        return None
    return Finding(
        "first-run-differs",
        origins[0].module if origins else None,
        f"only the first run differs; the {len(keys) - 1} after it are equal, as with warm-up, tuning or a "
        "cache made on first use",
    )


def masked(differs: bool, finals: Iterable[int | None]) -> Finding | None:
    """A difference inside that does not reach the final output."""
    outputs = set(finals)
    if not differs or len(outputs) != 1 or None in outputs:
        return None
    return Finding("masked", None, "runs differ inside, and the final output agrees in all of them")


def mutates_input(view: TraceView, located: Located) -> Iterator[Finding]:
    """Arguments of an outermost call that it changed in place."""
    aligned = located.aligned
    outermost = compress(count(), (parent < 0 for parent in aligned.parent))
    changed: dict[int, dict[str, None]] = {}
    for module, record in {
        (aligned.module[n], aligned.out[k][n]) for n in outermost for k in aligned.present(n)
    }:
        sites = (site for site, _ in view.record(record) if site.startswith("mutated."))
        changed.setdefault(module, {}).update(dict.fromkeys(sites))
    for module in sorted(changed):
        if changed[module]:
            path = view.modules[module].path
            names = _some([site.removeprefix("mutated.") for site in sorted(changed[module])])
            yield Finding("mutates-input", path, f"{_title(path)} changes its inputs in place: {names}")


def _is_of(site: str, value: str) -> bool:
    """Whether the site is the value's own or lies in it."""
    return site == value or site.startswith((f"{value}.", f"{value}["))


def unobserved_output(view: TraceView, located: Located) -> Finding | None:
    """Parts of the final output that could not be digested."""
    aligned = located.aligned
    outermost: set[str] = set()
    if view.meta.get("mode") == "script":  # whose final outputs are those of its outermost calls
        outermost = {
            view.modules[m].path
            for m, parent in zip(aligned.module, aligned.parent, strict=True)
            if parent < 0
        }
    missing = dict.fromkeys(
        f"{site} ({reason})"
        for run in located.runs
        for path, site, reason in run.unobserved
        if (path in outermost and _is_of(site, "out")) or (not path and _is_of(site, "final"))
    )
    if not missing:
        return None
    return Finding(
        "unobserved-output", None, f"parts of the final output were not observed: {_some(list(missing))}"
    )


def value_equal(origins: Sequence[Origin]) -> Iterator[Finding]:
    """Origins whose outputs differ in bits only (-0.0 and 0.0, NaN payloads)."""
    for origin in origins:
        if origin.value_equal:
            yield Finding(
                "value-equal",
                origin.module,
                f"the outputs of {_title(origin.module)} differ in bits and are equal as numbers: -0.0 and "
                "0.0, or NaNs with other payloads",
            )


def nan(view: TraceView, located: Located) -> Finding | None:
    """NaNs in a final output small enough to have kept its bytes."""
    sites: dict[str, None] = {}
    for record in dict.fromkeys(run.records[FINAL] for run in located.runs if FINAL in run.records):
        sites |= {site: None for site, value in view.record(record) if has_nan(view.value(value))}
    return Finding("nan", None, f"the final output holds NaN: {_some(list(sites))}") if sites else None


def stored(meta: Mapping[str, object]) -> Iterator[Finding]:
    """Findings that the audit itself established."""
    entries = meta.get("findings")
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        yield Finding(entry["kind"], entry.get("module"), entry["message"])


def unique(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(finding for finding in findings if finding is not None))


def _title(path: str) -> str:
    return path or "the root"


def _next(view: TraceView, module: int | None) -> str:
    return "no further call" if module is None else f"a call of {_title(view.modules[module].path)}"


def _unequal_errors(located: Located) -> list[int]:
    """The innermost calls that end with an exception in some runs only."""
    aligned = located.aligned
    nodes = [
        node
        for node in unequal(aligned.flags)
        if len({aligned.flags[k][node] for k in aligned.present(node)}) > 1
    ]
    around = {parent for n in nodes for parent in aligned.ancestors(n)}
    return [n for n in nodes if n not in around]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
