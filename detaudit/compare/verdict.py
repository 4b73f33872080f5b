"""The verdict, and the figures that say how sure it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from detaudit.compare.classes import FINAL, INPUTS, differing, record_keys, whole_keys
from detaudit.compare.locate import Located
from detaudit.core.recording import HOOKS_OFF, RunColumns
from detaudit.core.records import Condition, Rate, Verdict
from detaudit.core.stats import rate


@dataclass(frozen=True, slots=True)
class Figures:
    """``keys``: one per main run, equal for runs equal in everything recorded."""

    keys: Sequence[Hashable]
    runs_differing: int
    distinct_outputs: int
    modal_share: float
    rate: Rate


def decide(*, inputs_differ: bool, differs: bool, compared: bool, observed: bool) -> Verdict:
    """The four rules in their order; nothing else softens or hardens a verdict."""
    if inputs_differ:
        return "inconclusive"
    if differs:
        return "nondeterministic"
    return "deterministic" if compared and observed else "inconclusive"


def figures(located: Located) -> Figures:
    """How many runs differ from the most common one, in anything recorded and in the final output."""
    runs = located.runs
    class_of = {m: k for k, item in enumerate(located.aligned.classes) for m in item.members}
    keys = [(class_of[index], records) for index, records in enumerate(record_keys(runs))]
    outputs = Counter(final_outputs(located))
    apart = differing(keys)
    return Figures(
        keys=keys,
        runs_differing=apart,
        distinct_outputs=len(outputs),
        modal_share=max(outputs.values(), default=0) / max(len(runs), 1),
        rate=rate(apart, max(len(runs) - 1, 0)),
    )


def final_outputs(located: Located) -> list[Hashable]:
    """The final output of each run; where it was not taken, what the outermost calls returned."""
    runs = located.runs
    if all(FINAL in run.records for run in runs):
        return [run.records[FINAL] for run in runs]
    return [tuple(out for out, parent in zip(run.out, run.parent, strict=True) if parent < 0) for run in runs]


def conditions(
    runs: Sequence[RunColumns], main: Sequence[RunColumns], main_keys: Sequence[Hashable]
) -> tuple[Condition, ...]:
    """Each condition judged by itself, in the order in which they were first run."""
    by_name: dict[str, list[RunColumns]] = {}
    for run in runs:
        by_name.setdefault(run.condition, []).append(run)
    aligned = {run.index: key for run, key in zip(main, main_keys, strict=True)}
    return tuple(_condition(name, group, aligned) for name, group in by_name.items())


def condition_differs(runs: Sequence[RunColumns]) -> bool:
    """Whether runs of one condition on the same inputs differ."""
    by_inputs: dict[int | None, set[Hashable]] = {}
    for run, key in zip(runs, whole_keys(runs), strict=True):
        by_inputs.setdefault(run.records.get(INPUTS), set()).add(key)
    return any(len(keys) > 1 for keys in by_inputs.values())


def _condition(name: str, runs: Sequence[RunColumns], aligned: Mapping[int, Hashable]) -> Condition:
    if name == HOOKS_OFF:
        keys: list[Hashable] = [run.records.get(FINAL) for run in runs]
    elif runs[0].index in aligned:
        keys = [aligned[run.index] for run in runs]
    else:
        keys = whole_keys(runs)
    apart = differing(keys)
    verdict = decide(inputs_differ=False, differs=apart > 0, compared=len(runs) > 1, observed=True)
    return Condition(name, len(runs), apart, verdict)


def coverage(meta: Mapping[str, object], located: Located, reason: str | None) -> dict[str, object]:
    """What was and what was not seen. ``unobserved``: [module, site, reason, runs] entries."""
    given = meta.get("coverage")
    body: dict[str, object] = dict(given) if isinstance(given, Mapping) else {}
    unobserved = Counter(entry for run in located.runs for entry in dict.fromkeys(run.unobserved))
    aligned = located.aligned
    body["calls"] = max((len(run.module) for run in located.runs), default=0)
    body["modules_called"] = len(set(aligned.module))
    body["unobserved"] = [[*entry, runs] for entry, runs in unobserved.items()]
    if meta.get("excluded"):
        body["excluded"] = meta["excluded"]
    if reason is not None:
        body["reason"] = reason
    return body
