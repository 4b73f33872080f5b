"""Modules that the audit found to differ because of what they were handed in a way that no record shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from detaudit.compare.align import Aligned
from detaudit.compare.classes import MAIN_CONDITIONS
from detaudit.core.recording import RunColumns, TraceView

HANDED = "handed"
"""The entry of a trace's ``meta``: (module path, path of the module around it that made the value) pairs. The
second is None where another origin made it."""


def excused(view: TraceView, aligned: Aligned, runs: Sequence[RunColumns]) -> set[int]:
    """Calls that are no source by themselves.

    With a value made by a module around it, what lies between the two is handed it as well. Where another
    origin made it, every call around is excused, but in the main runs only: with that origin held fixed,
    what still differs does so by itself.
    """
    found: set[int] = set()
    for path, maker in _entries(view.meta):
        if maker is None and runs[0].condition not in MAIN_CONDITIONS:
            continue
        for node, module in enumerate(aligned.module):
            if view.modules[module].path == path:
                found |= {node, *_around(view, aligned, node, maker)}
    return found


def _around(view: TraceView, aligned: Aligned, node: int, maker: str | None) -> Iterator[int]:
    """The calls around a node, up to that of the maker."""
    for other in aligned.ancestors(node):
        if view.modules[aligned.module[other]].path == maker:
            return
        yield other


def _entries(meta: Mapping[str, object]) -> Iterator[tuple[str, str | None]]:
    entries = meta.get(HANDED)
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        yield entry[0], entry[1]
