"""Two traces of one model, from other machines, versions or settings: where their bits part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from detaudit.compare.classes import MAIN_CONDITIONS
from detaudit.core.comparison import Outcome, SiteDifference, Tolerance, TraceComparison
from detaudit.core.gating import Change, EnvironmentChange
from detaudit.core.recording import TraceView
from detaudit.differ.bits import ABSENT, PARAMETERS, VARIES, Bits, Content, Key, bits
from detaudit.differ.changes import contents, first_change
from detaudit.differ.environment import changes, fingerprint, flatten
from detaudit.differ.sites import differences, final_outputs, outputs, reference_run


@dataclass(frozen=True, slots=True)
class _Side:
    """One trace under the condition that is compared."""

    view: TraceView
    bits: Bits

    @property
    def environment(self) -> Mapping[str, Any]:
        found = self.view.meta.get("environment")
        return found if isinstance(found, Mapping) else {}


def compare_traces(
    a: TraceView, b: TraceView, names: tuple[str, str] = ("A", "B"), tolerance: Tolerance | None = None
) -> TraceComparison:
    """Compare ``b`` with ``a``. Pure: reads both, changes nothing.

    Calls are matched by module and ordinal, and judged only where their arguments are the same bits. Without
    a tolerance two traces are equal or different. With one the final output decides, and nothing but equal
    bits is called equal.

    Raises:
        TraceUnreadable: one of them is damaged, or holds no finished run.
    """
    targets = str(a.meta.get("target", "")), str(b.meta.get("target", ""))
    found = TraceComparison(*names, targets, "inconclusive", "", tolerance=tolerance)
    sides = _sides(a, b)
    if sides is None:
        return replace(found, reason="the traces have no condition in common that was recorded call by call")
    one, two = sides
    found = replace(
        found,
        condition=one.bits.condition,
        environment=_environment(one, two),
        parameters=_parameters(one, two),
        varying=_varying(one, two),
        notes=_notes(one, two),
        calls=_compared(one, two),
    )
    inputs = {one.bits.inputs, two.bits.inputs}
    if VARIES in inputs or (len(inputs) == 2 and ABSENT not in inputs):
        return replace(found, reason="the inputs of the two differ, so their outputs cannot be compared")
    change = first_change(two.bits, contents(one.bits), one.bits.parameters)
    final = _final(one, two)
    if change is None and final:
        change = Change("", "", 0, "final")
    sites = _sites(one, two, change)
    outcome, reason = _outcome(found, change, final, one.bits, two.bits)
    return replace(found, outcome=outcome, reason=reason, change=change, sites=sites, final=final)


def _sides(a: TraceView, b: TraceView) -> tuple[_Side, _Side] | None:
    """Both under one condition; repeats in one process and in fresh ones may be compared with each other."""
    bits_a, bits_b = bits(a), bits(b)
    common = [name for name in bits_a if name in bits_b]
    common.sort(key=lambda name: name not in MAIN_CONDITIONS)
    if common:
        return _Side(a, bits_a[common[0]]), _Side(b, bits_b[common[0]])
    main_a, main_b = ([found[n] for n in MAIN_CONDITIONS if n in found] for found in (bits_a, bits_b))
    return (_Side(a, main_a[0]), _Side(b, main_b[0])) if main_a and main_b else None


def _outcome(
    found: TraceComparison,
    change: Change | None,
    final: tuple[SiteDifference, ...],
    one: Bits,
    two: Bits,
) -> tuple[Outcome, str]:
    if VARIES in (one.final, two.final) and (change is None or found.tolerance is not None):
        return "inconclusive", "the final output varies within a trace: audit that trace first"
    if change is None:
        if found.varying:
            return "inconclusive", "what could be compared is equal, and some modules vary within a trace"
        if not found.calls and ABSENT in (one.final, two.final):
            return "inconclusive", "no call had the same arguments in both, and no final output was taken"
        return "equal", f"the same bits in {found.calls} calls and in the final output"
    if found.tolerance is None:
        return "different", f"first in {change}"
    return _tolerated(found.tolerance, final, ABSENT in (one.final, two.final))


def _tolerated(tolerance: Tolerance, final: tuple[SiteDifference, ...], absent: bool) -> tuple[Outcome, str]:
    if absent:
        return "inconclusive", "no final output was taken, so there is nothing to hold the tolerance against"
    if not final:
        return "within tolerance", "modules differ, and the final output is the same bits"
    verdicts = {site.site: site.within(tolerance) for site in final}
    beyond = [site for site, within in verdicts.items() if within is False]
    unknown = [site for site, within in verdicts.items() if within is None]
    if beyond:
        return "different", f"the final output differs by more than {tolerance} at {', '.join(beyond[:4])}"
    if unknown:
        reasons = dict.fromkeys(site.reason or "" for site in final if site.site in unknown)
        return "inconclusive", f"how far {', '.join(unknown[:4])} differ cannot be told: {'; '.join(reasons)}"
    return "within tolerance", f"the final output differs by at most {tolerance}"


def _environment(one: _Side, two: _Side) -> tuple[EnvironmentChange, ...]:
    """The fingerprint's entries first: what else differs seldom changes bits."""
    first = fingerprint(one.environment), fingerprint(two.environment)
    found = changes(flatten(one.environment), flatten(two.environment))
    return tuple(sorted(found, key=lambda change: not any(change.name in known for known in first)))


def _parameters(one: _Side, two: _Side) -> tuple[str, ...]:
    records = [_parameter_values(side) for side in (one, two)]
    if not all(records):
        return ()
    return tuple(site.site for site in differences(*records))


def _parameter_values(side: _Side) -> dict[str, Any]:
    record = next((r.records[PARAMETERS] for r in side.view.runs() if PARAMETERS in r.records), None)
    if record is None:
        return {}
    return {site: side.view.value(value) for site, value in side.view.record(record)}


def _varying(one: _Side, two: _Side) -> tuple[str, ...]:
    calls = [call for side in (one, two) for call in side.bits.calls if VARIES in call.content]
    return tuple(dict.fromkeys(call.module for call in calls))


def _compared(one: _Side, two: _Side) -> int:
    before: Mapping[Key, Content] = contents(one.bits)
    pairs = ((before.get(call.key), call.content) for call in two.bits.calls)
    return sum(1 for was, now in pairs if was and was.args == now.args and VARIES not in (*was, *now))


def _notes(one: _Side, two: _Side) -> tuple[str, ...]:
    notes = []
    for name, side in (("A", one), ("B", two)):
        if side.bits.runs < 2:
            notes.append(f"{name} has a single run, so that a race in it would look like a difference")
        if not side.environment:
            notes.append(f"{name} holds no environment")
    if one.bits.condition != two.bits.condition:
        notes.append(f"A was recorded {one.bits.condition}, B {two.bits.condition}")
    if ABSENT in (one.bits.inputs, two.bits.inputs):
        notes.append("the inputs were not recorded; calls are compared by their own arguments")
    return tuple(notes)


def _final(one: _Side, two: _Side) -> tuple[SiteDifference, ...]:
    if one.bits.final == two.bits.final or {VARIES, ABSENT} & {one.bits.final, two.bits.final}:
        return ()
    return differences(*(final_outputs(s.view, reference_run(s.view, s.bits.condition)) for s in (one, two)))


def _sites(one: _Side, two: _Side, change: Change | None) -> tuple[SiteDifference, ...]:
    if change is None or change.kind in ("final", "calls"):
        return ()
    key = change.module, change.call
    return differences(*(outputs(s.view, reference_run(s.view, s.bits.condition), key) for s in (one, two)))
