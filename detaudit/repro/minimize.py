"""Makes a case smaller while it still differs: delta debugging over the sizes of its axes, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from detaudit.kernels.cases import Case
from detaudit.repro.shrink import Axis, axes

FACTORS = (8.0, 4.0, 2.0, 4.0 / 3.0)
"""Large steps first: most of a captured call has nothing to do with the race."""


def minimize(
    case: Case,
    differs: Callable[[Case], bool],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Case:
    """The smallest case found; ``case`` itself, where nothing smaller differs.

    First all axes are divided at once, then one after the other, until no step is left that works. The
    result is minimal in that no single axis could be divided further (if the time sufficed).

    Args:
        differs: tries a candidate. Called for each combination of sizes at most once.
        seconds: no candidate is tried after this time.
    """
    end = clock() + seconds
    tried: set[tuple[int, ...]] = set()
    while clock() < end:
        found = next((c for c in _candidates(case, tried) if clock() < end and differs(c)), None)
        if found is None:
            return case
        case = found
    return case


def _candidates(case: Case, tried: set[tuple[int, ...]]) -> Iterator[Case]:
    known = axes(case)
    steps: list[list[tuple[Axis, int]]] = [[(axis, axis.divided(f)) for axis in known] for f in FACTORS[:-1]]
    steps += [[(axis, axis.divided(factor))] for axis in known for factor in FACTORS]
    for step in steps:
        sizes = {axis.name: axis.size for axis in known} | {axis.name: size for axis, size in step}
        if tuple(sizes.values()) in tried or all(size >= axis.size for axis, size in step):
            continue
        tried.add(tuple(sizes.values()))
        smaller = _cut(case, [(axis.name, size) for axis, size in step if size < axis.size])
        if smaller is not None:
            yield smaller


def _cut(case: Case, sizes: list[tuple[str, int]]) -> Case | None:
    """The case with several axes cut; ``None`` where one is gone, or cannot be cut, after the others."""
    for name, size in sizes:
        axis = next((axis for axis in axes(case) if axis.name == name), None)
        if axis is None:
            return None
        try:
            case = axis.cut(size)
        except (RuntimeError, ValueError, IndexError):
            return None
    return case
