"""``analyze``: the rules in their order, from a trace to a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from detaudit.compare import findings, observer, producer, verdict
from detaudit.compare.align import ABSENT
from detaudit.compare.classes import FINAL, MAIN_CONDITIONS
from detaudit.compare.hidden import parameters_differ
from detaudit.compare.history import compare_history
from detaudit.compare.locate import Located, locate
from detaudit.compare.memory import (
    WithoutState,
    blames_other_state,
    counters,
    judged_by_outputs,
    only_remembers,
    without_counters,
)
from detaudit.compare.origins import Gaps
from detaudit.core.options import command_line
from detaudit.core.recording import HISTORY, HOOKS_OFF, SCALAR_PREFIX, SUPERSEDED, RunColumns, TraceView
from detaudit.core.records import Finding, Origin, Report

UNMATCHED_LISTED = 100
NOTHING = f"{SCALAR_PREFIX}NoneType"
"""dtype of a value that is None."""
HIDDEN_STATE = "hidden state: the same sequence of runs gives the same sequence of outputs in another process"


def analyze(view: TraceView) -> Report:
    """Compare the runs of a trace. Pure: reads the trace, changes nothing.

    Main runs are those of the conditions ``in-process`` and ``fresh-process``; they are compared with each
    other. Runs of other conditions are compared within their condition. Of ``hooks-off`` runs only the final
    output is used, of ``history-1`` and ``history-2`` run k of one is also compared with run k of the other.
    State that differs and that no output shows is told, and does not decide (``memory``).
    """
    analysis = _Analysis(view)
    report = analysis.report()
    if only_remembers(view, report):
        quiet = _Analysis(WithoutState(view)).report()
        if quiet.verdict == "deterministic":
            return judged_by_outputs(view, quiet, report)
    counted = counters(view, (analysis.located, *analysis.others))
    if report.origins and counted:
        quiet = _Analysis(WithoutState(view, counted)).report()
        if quiet.origins and not blames_other_state(quiet, report):
            return without_counters(view, quiet, report, counted)
    return report


class _Analysis:
    """The intermediate results of one ``analyze``."""

    def __init__(self, view: TraceView) -> None:
        self.view = view
        self.runs = [run for run in view.runs() if run.condition != SUPERSEDED]
        self.recorded = [run for run in self.runs if run.condition != HOOKS_OFF]
        self.main = [run for run in self.runs if run.condition in MAIN_CONDITIONS]
        off = [run for run in self.runs if run.condition == HOOKS_OFF]
        self.inputs = findings.inputs_differ(view, [*self.main, *off])
        self.located = self._locate(self.main)
        self.figures = verdict.figures(self.located)
        self.observer = observer.observe(self.main, self.runs)
        self.history = compare_history(self.runs)
        self.others = list(map(self._locate, self._other_conditions())) if self.inputs is None else []
        self.main_differs = self.figures.runs_differing > 0 or parameters_differ(view, self.main)

    def report(self) -> Report:
        observed = self._observed()
        decision = verdict.decide(
            inputs_differ=self.inputs is not None,
            differs=self._differs(),
            compared=len(self.main) > 1,
            observed=observed,
        )
        origins = self._origins() if decision == "nondeterministic" else ()
        reason = self._reason(observed) if decision == "inconclusive" else None
        meta = self.view.meta
        return Report(
            verdict=decision,
            runs=len(self.main),
            runs_differing=self.figures.runs_differing,
            distinct_outputs=self.figures.distinct_outputs if self._final_observed() else 0,
            modal_share=self.figures.modal_share,
            rate=self.figures.rate,
            origins=origins,
            findings=findings.unique(self._findings(origins)),
            conditions=verdict.conditions(self.runs, self.main, self.figures.keys),
            observer=self.observer.to_json() if self.observer.off else {},
            restored=_mapping(meta.get("restored")),
            coverage=verdict.coverage(meta, self.located, reason) | self._coverage(),
            environment=_mapping(meta.get("environment")),
            target=str(meta.get("target", "")),
            trace=str(meta.get("trace", "")),
            arguments=command_line(meta),
        )

    def _locate(self, runs: Sequence[RunColumns]) -> Located:
        return locate(self.view, runs, self._gaps(runs), self.recorded)

    def _gaps(self, runs: Sequence[RunColumns]) -> Gaps:
        excluded = self.view.meta.get("excluded")
        unobserved = dict.fromkeys((path, site) for run in runs for path, site, _ in run.unobserved)
        return Gaps(
            tuple(map(str, excluded)) if isinstance(excluded, (list, tuple)) else (), tuple(unobserved)
        )

    def _other_conditions(self) -> Iterator[list[RunColumns]]:
        names = dict.fromkeys(run.condition for run in self.recorded if run.condition not in MAIN_CONDITIONS)
        for name in names:
            runs = [run for run in self.recorded if run.condition == name]
            if name not in HISTORY and verdict.condition_differs(runs):
                yield runs

    def _differs(self) -> bool:
        history = [[run for run in self.runs if run.condition == name] for name in HISTORY]
        return (
            self.main_differs
            or bool(self.others)
            or any(map(verdict.condition_differs, history))
            or self.observer.off_differs
            or self.observer.bits_differ
        )

    def _origins(self) -> tuple[Origin, ...]:
        found = {(origin.module, origin.part): origin for origin in self.located.origins}
        for located in self.others:
            condition, comparisons = located.runs[0].condition, len(located.runs) - 1
            for origin in located.origins:
                there = replace(origin, condition=condition, comparisons=comparisons)
                found.setdefault((origin.module, origin.part), there)
        hidden = self.history is not None and self.history.hidden_state
        return tuple(
            replace(o, mechanism=HIDDEN_STATE) if hidden and o.mechanism is None else o
            for o in found.values()
        )

    def _findings(self, origins: tuple[Origin, ...]) -> Iterator[Finding | None]:
        view, located = self.view, self.located
        yield self.inputs
        if self.inputs is None:
            differs = self._differs()
            for each in (located, *self.others):
                yield from findings.carried_state(view, each)
                yield from findings.control_flow(view, each)
                yield producer.consumed_generator(view, each.aligned)
            yield findings.hidden_state(self.history, differs, origins)
            yield findings.first_run_differs(self.figures.keys, origins)
            yield self._producer(differs, origins)
            yield self.observer.finding()
            if self._final_observed():
                yield findings.masked(self.main_differs, (*self.observer.on, *self.observer.off))
            yield from findings.value_equal(origins)
        yield from findings.stateful(view, self.main)
        yield from findings.mutates_input(view, located)
        yield findings.unobserved_output(view, located)
        yield findings.nan(view, located)
        yield from findings.stored(view.meta)

    def _producer(self, differs: bool, origins: tuple[Origin, ...]) -> Finding | None:
        if self.main_differs:
            return producer.unobserved_producer(self.view, self.located)
        if not differs or origins or self.observer.agree is False:
            return None
        return Finding(
            "unobserved-producer",
            None,
            "only runs with hooks off, or of the history control, differ: no call can be named",
        )

    def _observed(self) -> bool:
        """Whether any output was seen, of a call or the final one; a call that returns None shows nothing."""
        return self._final_observed() or self._tells(chain.from_iterable(self.located.aligned.out))

    def _final_observed(self) -> bool:
        return self._tells(run.records[FINAL] for run in self.main if FINAL in run.records)

    def _tells(self, records: Iterable[int]) -> bool:
        return any(
            self.view.value(value).dtype != NOTHING
            for record in records
            if record != ABSENT
            for _, value in self.view.record(record)
        )

    def _reason(self, observed: bool) -> str:
        if self.inputs is not None:
            return "the inputs differ between runs"
        if len(self.main) < 2:
            return f"nothing was compared: {len(self.main)} run" + "s" * (len(self.main) != 1)
        if observed:
            return ""
        script = self.view.meta.get("mode") == "script"
        where = "; in a script, only calls of nn.Module in its own process are" if script else ""
        return f"nothing was observed: no output of a call and no final output{where}"

    def _coverage(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        if self.history is not None:
            body["history"] = {
                "positions": self.history.positions,
                "differing": self.history.differing,
            }
        aligned = self.located.aligned
        unmatched = aligned.unmatched()
        if unmatched:
            body["unmatched_calls"] = len(unmatched)
            body["unmatched"] = [
                [self.view.modules[aligned.module[n]].path, aligned.ordinal(n), aligned.weight(n)]
                for n in unmatched[:UNMATCHED_LISTED]
            ]
        return body


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
