"""Bits against the lock file: the same, others for the same inputs, or nothing to compare with."""

from __future__ import annotations

from collections.abc import Mapping

from detaudit.core.gating import BaselineResult, Change, Comparison
from detaudit.differ.bits import VARIES, Bits
from detaudit.differ.changes import first_change
from detaudit.differ.environment import changes, identity
from detaudit.gate.lock import ConditionBits, Lock, TargetBits, folded


def compare_with_lock(
    lock: Lock, name: str, entries: Mapping[str, str], conditions: Mapping[str, Bits]
) -> BaselineResult:
    """How the bits of a target, in the environment with these fingerprint entries, compare with the lock.

    Where the environment is not in the lock, the bits are compared with the nearest one's that is: what
    differs then may well be due to the environment.
    """
    environment = identity(entries)
    known = lock.targets.get(name, {})
    if not known:
        return BaselineResult("absent", environment)
    against = environment if environment in known else nearest(lock, name, entries)
    moved = changes(lock.environments[against], entries)
    before = known[against]
    common = tuple(condition for condition in conditions if condition in before.conditions)
    change, bits_equal, inputs_equal = _compare(before, conditions, common)
    comparison: Comparison
    if against != environment:
        comparison = "unknown-environment"
    elif not common:
        comparison = "absent"
    elif not inputs_equal:
        comparison = "other-inputs"
    else:
        comparison = "equal" if bits_equal else "changed"
    stable, varying = _counts(before, conditions, common)
    if comparison == "equal" and not stable:
        comparison, bits_equal = "nothing-stable", None
    return BaselineResult(
        comparison, environment, against, bits_equal, change, moved, common, stable, varying
    )


def nearest(lock: Lock, name: str, entries: Mapping[str, str]) -> str:
    """The environment of the target's baselines that differs in the fewest entries."""
    return min(
        sorted(lock.targets[name]), key=lambda key: len(changes(lock.environments.get(key, {}), entries))
    )


def _compare(
    before: TargetBits, conditions: Mapping[str, Bits], common: tuple[str, ...]
) -> tuple[Change | None, bool | None, bool]:
    """The first change of the first condition that has one, whether bits agree, and whether inputs do."""
    inputs_equal = all(conditions[name].inputs == before.conditions[name].inputs for name in common)
    if not common or not inputs_equal:
        return None, None, inputs_equal
    for name in common:
        change = _change(conditions[name], before.conditions[name], before.parameters)
        if change is not None:
            return change, False, True
    return None, True, True


def _counts(before: TargetBits, conditions: Mapping[str, Bits], common: tuple[str, ...]) -> tuple[int, int]:
    """Calls whose outputs are stable on both sides, and calls of which that does not hold."""
    stable = varying = 0
    for name in common:
        known = before.conditions[name].calls
        for call in folded(conditions[name]).calls:
            out = known[call.key].out if call.key in known else VARIES
            varies = VARIES in (call.content.out, out)
            stable, varying = stable + (not varies), varying + varies
    return stable, varying


def _change(now: Bits, before: ConditionBits, parameters: Mapping[str, str]) -> Change | None:
    change = first_change(folded(now), before.calls, parameters)
    if change is None and VARIES not in (now.final, before.final) and now.final != before.final:
        return Change("", "", 0, "final")
    return change
