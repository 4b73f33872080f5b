"""The module tree around the origins, folded to what a reader needs.

Shown are the origins, the modules that hold them, and their siblings; what lies below a sibling is only
counted, and a long row of alike siblings becomes one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from detaudit.core.records import Report

FOLD = 4
"""Neighbouring siblings of one class are folded from this many on."""


@dataclass(slots=True)
class Node:
    """A module: ``name`` is its last path component, ``cls`` may be empty if it was never seen."""

    path: str
    name: str
    cls: str = ""
    children: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the folded tree. ``hidden`` counts modules it stands for beside or below itself."""

    depth: int
    label: str
    cls: str
    path: str | None
    hidden: int = 0
    origin: bool = False


def module_tree(report: Report) -> list[Line]:
    """The folded tree of ``coverage["modules"]`` and the origins, depth first; empty without origins.

    The deepest known module holds the marks: a call ordinal has no place in a tree.
    """
    if not report.origins:
        return []
    root = _build(_known(report.coverage), ((o.module, o.cls) for o in report.origins))
    marked = {origin.module for origin in report.origins}
    return list(_lines(root, marked, 0))


def _known(coverage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in coverage.get("modules") or ():
        if isinstance(entry, Mapping):
            yield str(entry.get("path", "")), str(entry.get("class", ""))


def _build(*sources: Iterable[tuple[str, str]]) -> Node:
    root = Node("", "")
    for source in sources:
        for path, cls in source:
            _insert(root, path).cls = cls
    return root


def _insert(root: Node, path: str) -> Node:
    node = root
    for name in path.split(".") if path else ():
        below = f"{node.path}.{name}" if node.path else name
        node = node.children.setdefault(name, Node(below, name))
    return node


def _lines(node: Node, marked: set[str], depth: int) -> Iterator[Line]:
    """``node`` and, if an origin lies below it, its children."""
    opened = _holds(node, marked)
    hidden = 0 if opened else _size(node) - 1
    yield Line(depth, node.name, node.cls, node.path, hidden, node.path in marked)
    if opened:
        for group in _groups(list(node.children.values()), marked):
            yield from _group_lines(group, marked, depth + 1)


def _group_lines(group: list[Node], marked: set[str], depth: int) -> Iterator[Line]:
    if len(group) < FOLD:
        for node in group:
            yield from _lines(node, marked, depth)
    else:
        total = sum(map(_size, group))
        yield Line(depth, f"{group[0].name} to {group[-1].name}", group[0].cls, None, total)


def _groups(nodes: list[Node], marked: set[str]) -> Iterator[list[Node]]:
    """Neighbours that may be folded together, in order."""
    group: list[Node] = []
    for node in nodes:
        plain = node.path not in marked and not _holds(node, marked)
        if group and plain and group[-1].cls == node.cls and not _shown(group[-1], marked):
            group.append(node)
            continue
        if group:
            yield group
        group = [node]
    if group:
        yield group


def _shown(node: Node, marked: set[str]) -> bool:
    return node.path in marked or _holds(node, marked)


def _holds(node: Node, marked: set[str]) -> bool:
    prefix = f"{node.path}." if node.path else ""
    return any(path.startswith(prefix) and path != node.path for path in marked)


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.children.values()))
