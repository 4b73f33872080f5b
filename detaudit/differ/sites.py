"""Which tensors of two calls, or of two final outputs, differ, where and how far."""

from __future__ import annotations

import math
from collections.abc import Mapping

from detaudit.compare.classes import FINAL, group
from detaudit.core.comparison import SiteDifference
from detaudit.core.geometry import ITEM_BYTES, geometry, rows_differing
from detaudit.core.recording import SCALAR_PREFIX, RunColumns, TraceView, Value
from detaudit.differ.bits import Key
from detaudit.differ.numbers import distance

NOT_KEPT = "the bytes were not kept: traces hold those of values of at most 4 KiB"


def reference_run(view: TraceView, condition: str) -> RunColumns:
    """The most common run of a condition."""
    return group([run for run in view.runs() if run.condition == condition])[0].run


def outputs(view: TraceView, run: RunColumns, key: Key) -> dict[str, Value]:
    """The outputs of one call, by site."""
    module, left = key
    for index, entry in enumerate(run.module):
        if view.modules[entry].path == module:
            if left == 0:
                return _values(view, run.out[index])
            left -= 1
    return {}


def final_outputs(view: TraceView, run: RunColumns) -> dict[str, Value]:
    return _values(view, run.records[FINAL]) if FINAL in run.records else {}


def differences(a: Mapping[str, Value], b: Mapping[str, Value]) -> tuple[SiteDifference, ...]:
    """Sites whose values are not the same bits, in order."""
    return tuple(
        _difference(site, a.get(site), b.get(site)) for site in sorted({*a, *b}) if a.get(site) != b.get(site)
    )


def _values(view: TraceView, record: int) -> dict[str, Value]:
    return {site: view.value(value) for site, value in view.record(record)}


def _difference(site: str, a: Value | None, b: Value | None) -> SiteDifference:
    kinds = _kind(a), _kind(b)
    if a is None or b is None or kinds[0] != kinds[1]:
        return SiteDifference(site, *kinds, reason="dtype or shape differ" if a and b else "only on one side")
    if a.dtype.startswith(SCALAR_PREFIX):
        texts = [(v.raw or b"?").decode("utf-8", "replace") for v in (a, b)]
        return SiteDifference(site, *kinds, reason=f"{texts[0]} -> {texts[1]}")
    rows, total = _rows(a, b)
    if a.raw is None or b.raw is None:
        return SiteDifference(site, *kinds, rows, total, reason=NOT_KEPT)
    found = distance(a.dtype, a.raw, b.raw)
    if found is None:
        return SiteDifference(site, *kinds, rows, total, reason=f"{a.dtype} holds no plain numbers")
    if math.isinf(found.max_abs):
        reason = "a NaN or an infinity against another number"
        return SiteDifference(site, *kinds, rows, total, reason=reason, unbounded=True)
    error = None if math.isinf(found.rel_error) else found.rel_error
    return SiteDifference(site, *kinds, rows, total, found.max_ulp, found.max_abs, error)


def _rows(a: Value, b: Value) -> tuple[tuple[int, ...] | None, int | None]:
    if a.dtype not in ITEM_BYTES:
        return None, None
    total = geometry(a.shape, ITEM_BYTES[a.dtype]).rows
    if a.leaves is None or b.leaves is None:
        return None, total
    return rows_differing(a.dtype, a.shape, a.leaves, b.leaves), total


def _kind(value: Value | None) -> str | None:
    return None if value is None else f"{value.dtype}{list(value.shape)}"
