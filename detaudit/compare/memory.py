"""Runs that differ only in what modules remember, while everything they hand out agrees.

A call counter, a lazily filled cache, an identifier made anew in every process: such state differs on entry
to a call, and is told. But a run is judged by what comes out of it. Where no argument, return value, input
changed in place, gradient or final output differs, and no call made different state from equal state, the
verdict is that of the outputs.

Where outputs do differ, numbers and other host scalars that earlier runs left in a module's attributes (a
counter of calls, for one) still say nothing of where that begins; see ``counters``.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from detaudit.compare.classes import MAIN_CONDITIONS
from detaudit.compare.locate import Located
from detaudit.compare.origins import differed_on_entry, remembers
from detaudit.compare.state import differing_sites, races
from detaudit.core.recording import SUPERSEDED, ModuleInfo, RunColumns, TraceView, Value
from detaudit.core.records import Finding, Report

LARGE = ("large.start", "large.end")
_OWN_STATE = ("attr.", "buffer.")
_FIRST_OWN_ID = 1 << 40


class WithoutState:
    """A view of the same runs in which no call has state of its own.

    Args:
        sites: by module (an index), what is left out; None for all state.
    """

    def __init__(self, view: TraceView, sites: Mapping[int, Collection[str]] | None = None) -> None:
        self._view = view
        self._sites = sites
        self._ids: dict[tuple[int, int | None], int] = {}
        self._records: dict[tuple[tuple[str, int], ...], int] = {}
        self._contents: dict[int, tuple[tuple[str, int], ...]] = {}

    @property
    def modules(self) -> Sequence[ModuleInfo]:
        return self._view.modules

    @property
    def flags(self) -> Sequence[tuple[str, str | None]]:
        return self._view.flags

    @property
    def meta(self) -> Mapping[str, object]:
        return self._view.meta

    def runs(self) -> Sequence[RunColumns]:
        return [self._stateless(run) for run in self._view.runs()]

    def record(self, record_id: int) -> tuple[tuple[str, int], ...]:
        known = self._contents.get(record_id)
        return self._view.record(record_id) if known is None else known

    def value(self, value_id: int) -> Value:
        return self._view.value(value_id)

    def rows_differing(self, value_a: int, value_b: int) -> tuple[int, ...] | None:
        return self._view.rows_differing(value_a, value_b)

    def _stateless(self, run: RunColumns) -> RunColumns:
        records = run.records
        if self._sites is None:
            records = {name: record for name, record in records.items() if name not in LARGE}
        return replace(
            run,
            state=array("q", map(self._stripped, run.state, run.module)),
            out=array("q", map(self._stripped, run.out, run.module)),
            records=records,
        )

    def _stripped(self, record_id: int, module: int) -> int:
        if self._sites is not None and module not in self._sites:
            return record_id
        key = record_id, None if self._sites is None else module
        found = self._ids.get(key)
        if found is None:
            content = self._view.record(record_id)
            kept = tuple(entry for entry in content if not self._leaves_out(entry[0], module))
            found = self._ids[key] = self._id_of(kept)
        return found

    def _leaves_out(self, site: str, module: int) -> bool:
        return site.startswith(_OWN_STATE) if self._sites is None else site in self._sites[module]

    def _id_of(self, content: tuple[tuple[str, int], ...]) -> int:
        known = self._records.get(content)
        if known is None:
            known = self._records[content] = _FIRST_OWN_ID + len(self._records)
            self._contents[known] = content
        return known


def counters(view: TraceView, found: Iterable[Located]) -> dict[int, set[str]]:
    """By module, the attributes with host scalars that differ since earlier runs left them so."""
    sites: dict[int, set[str]] = {}
    for located in found:
        for item in located.carried:
            scalars = item.scalars(view, located.aligned)
            if scalars:
                sites.setdefault(located.aligned.module[item.node], set()).update(scalars)
    return sites


def _of_history(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == "history-dependent"]


def blames_other_state(quiet: Report, full: Report) -> bool:
    """Whether, with counters left out, what they changed elsewhere looks as if earlier runs had left it."""
    known = {origin.module for origin in full.origins if remembers(origin)}
    return any(remembers(origin) and origin.module not in known for origin in quiet.origins)


def without_counters(
    view: TraceView, quiet: Report, full: Report, sites: Mapping[int, Collection[str]]
) -> Report:
    """The report in which counters were left out, with what the report on everything found of them.

    They may be why an origin differs, as long as it is not known to race.

    Args:
        sites: of the counters, by module (an index).
    """
    others = [finding for finding in quiet.findings if finding not in _of_history(quiet)]
    paths = {view.modules[module].path: held for module, held in sites.items()}
    origins = [
        replace(origin, mechanism=differed_on_entry(paths[origin.module], perhaps=True))
        if origin.mechanism is None and origin.module in paths and not races(view, origin.module)
        else origin
        for origin in quiet.origins
    ]
    return replace(quiet, origins=tuple(origins), findings=(*others, *_of_history(full)))


def only_remembers(view: TraceView, report: Report) -> bool:
    """Whether all that differs may come from state that differed on entry."""
    remembering = {finding.module for finding in _of_history(report)}
    explained = all(origin.module in remembering for origin in report.origins)
    return report.verdict == "nondeterministic" and explained and not _has_source(view)


def _has_source(view: TraceView) -> bool:
    """Whether some call gave different outputs, or left different state, for equal arguments and state."""
    seen: dict[tuple[int, int, int, int], int] = {}
    for run in view.runs():
        if run.condition == SUPERSEDED:
            continue
        ordinals: dict[int, int] = {}
        for module, args, state, out in zip(run.module, run.args, run.state, run.out, strict=True):
            ordinal = ordinals[module] = ordinals.get(module, -1) + 1
            if seen.setdefault((module, ordinal, args, state), out) != out:
                return True
    return False


def judged_by_outputs(view: TraceView, quiet: Report, full: Report) -> Report:
    """The report on the outputs, which agree, with what the report on everything found of state."""
    told = _of_history(full)
    if not told:
        runs = [run.records for run in view.runs() if run.condition in MAIN_CONDITIONS]
        sites = [
            site
            for name in LARGE
            for site in differing_sites(view, [records[name] for records in runs if name in records])
        ]
        what = f" ({', '.join(dict.fromkeys(sites))})" if sites else ""
        message = f"state that is too large to digest at every call{what} differs around runs"
        told = [Finding("history-dependent", None, message)]
    verdict = "no output shows it, so the verdict does not count it"
    told = [replace(finding, message=f"{finding.message}; {verdict}") for finding in told]
    return replace(quiet, findings=(*quiet.findings, *told))
