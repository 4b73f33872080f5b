"""Which call of one run corresponds to which call of another.

Runs with the same sequence of (module, parent, via) correspond by index. Where the sequences part, every
call behind the first difference is matched under its parent: first with a call of the same module on the
same arguments, then with the next free call of the same module. What stays unmatched is a node of its own,
which the other runs lack. Wrong matches cost completeness, never correctness: a call is judged only where two
runs gave the same module the same inputs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count, islice, repeat
from operator import eq, ne

from detaudit.compare.classes import RunClass, reference_first
from detaudit.core.recording import RunColumns, TraceView

ABSENT = -1
"""In a column: this class has no such call."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a class takes another way than the reference: the innermost module around the first difference.

    ``module`` is an index into ``TraceView.modules``, ``None`` outside of all modules. ``extra`` and
    ``lacking`` are the modules that it calls next in this class and in the reference, where it does.
    """

    module: int | None
    call: int
    extra: int | None
    lacking: int | None
    weight: int


@dataclass(frozen=True, slots=True)
class Aligned:
    """Classes of runs over one common tree of calls ("nodes"), the reference class first.

    ``module`` and ``parent`` have one entry a node; a parent comes before its children. ``args``, ``state``,
    ``out`` and ``flags`` hold one column per class, with ABSENT where the class has no such call; ``calls``
    maps a node to the call's index in the class's run, or is ``None`` where the two are equal.
    """

    classes: tuple[RunClass, ...]
    module: Sequence[int]
    parent: Sequence[int]
    args: tuple[Sequence[int], ...]
    state: tuple[Sequence[int], ...]
    out: tuple[Sequence[int], ...]
    flags: tuple[Sequence[int], ...]
    calls: tuple[Sequence[int] | None, ...]
    partings: tuple[Parting, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether some class may lack a node."""
        return any(calls is not None for calls in self.calls)

    def present(self, node: int) -> list[int]:
        """Classes that have the node."""
        return [k for k, args in enumerate(self.args) if args[node] != ABSENT]

    def ancestors(self, node: int) -> Iterator[int]:
        """The enclosing nodes, innermost first."""
        node = self.parent[node]
        while node >= 0:
            yield node
            node = self.parent[node]

    def unmatched(self) -> list[int]:
        """Nodes that some class lacks."""
        return (
            [n for n in range(len(self.module)) if len(self.present(n)) < len(self.classes)]
            if self.partial
            else []
        )

    def weight(self, node: int) -> int:
        """How many runs have the node."""
        return sum(self.classes[k].weight for k in self.present(node))

    def ordinal(self, node: int) -> int:
        """Which call of its module the node is, in the first class that has it."""
        k = self.present(node)[0]
        calls = self.calls[k]
        index = node if calls is None else calls[node]
        module = self.module[node]
        return count_of(self.classes[k].run.module[:index], module)

    def children(self, node: int) -> list[int]:
        """The calls made directly by ``node``."""
        later = islice(self.parent, node + 1, None)
        return list(compress(count(node + 1), map(eq, later, repeat(node))))


def align(view: TraceView, classes: Sequence[RunClass]) -> Aligned:
    """Lay the classes, the reference first, over one another. Linear in the number of calls."""
    if not classes:
        return Aligned((), (), (), (), (), (), (), ())
    vias = [via for via, _ in view.flags]
    reference = classes[0].run
    structures = [_Structure(item.run, vias) for item in classes]
    if all(structure.equals(structures[0]) for structure in structures[1:]):
        runs = [item.run for item in classes]
        return Aligned(
            tuple(classes),
            reference.module,
            reference.parent,
            tuple(run.args for run in runs),
            tuple(run.state for run in runs),
            tuple(run.out for run in runs),
            tuple(run.flags for run in runs),
            (None,) * len(runs),
        )
    tree = _Tree(structures[0])
    partings: list[Parting] = []
    for structure, item in zip(structures, classes, strict=True):
        split = tree.add(structure)
        if split is not None:
            partings.append(_parting(structures[0], structure, split, item.weight))
    return tree.aligned(classes, partings)


class _Structure:
    """The sequence of calls of a run, without their values."""

    def __init__(self, run: RunColumns, vias: Sequence[str]) -> None:
        self.run = run
        self._vias = vias

    def equals(self, other: _Structure) -> bool:
        a, b = self.run, other.run
        if a.module != b.module or a.parent != b.parent:
            return False
        return a.flags == b.flags or self.via == other.via

    @cached_property
    def via(self) -> Sequence[str]:
        return [self._vias[flag] for flag in self.run.flags]

    def split(self, other: _Structure) -> int:
        """Index of the first call that differs; the length of the shorter where one continues the other."""
        a, b = self.run, other.run
        pairs: list[tuple[Sequence[object], Sequence[object]]]
        pairs = [(a.module, b.module), (a.parent, b.parent), (self.via, other.via)]
        shorter = min(len(a.module), len(b.module))
        return min(next(compress(count(), map(ne, x, y)), shorter) for x, y in pairs)


class _Tree:
    """The union of the calls of all classes, grown class by class from the reference."""

    def __init__(self, reference: _Structure) -> None:
        self.reference = reference
        self.module = list(reference.run.module)
        self.parent = list(reference.run.parent)
        self.loose: list[Hashable] = [(m, reference.via[i]) for i, m in enumerate(self.module)]
        self.args = list(reference.run.args)
        self.calls: list[list[int]] = []

    def add(self, structure: _Structure) -> int | None:
        """Match the calls of one class. Returns the first that differs from the reference's, if any does."""
        run = structure.run
        if structure.equals(self.reference):
            self.calls.append(list(range(len(run.module))))
            return None
        split = structure.split(self.reference)
        node_of = [*range(split), *([ABSENT] * (len(run.module) - split))]
        below = _by_parent(self.parent, split)
        for parent, calls in sorted(_by_parent(run.parent, split).items()):
            node = node_of[parent] if parent >= 0 else -1
            self._match(structure, calls, below.get(node, []), node_of)
            for call in calls:
                if node_of[call] == ABSENT:
                    node_of[call] = self._new(structure, call, node)
        placed = [ABSENT] * len(self.module)
        for call, node in enumerate(node_of):
            placed[node] = call
        self.calls.append(placed)
        return split

    def _match(self, structure: _Structure, calls: list[int], nodes: list[int], node_of: list[int]) -> None:
        args = structure.run.args
        loose = {call: (structure.run.module[call], structure.via[call]) for call in calls}
        taken: set[int] = set()
        exact_of: Callable[[int], Hashable] = lambda node: (self.loose[node], self.args[node])  # noqa: E731
        for key_of_call, key_of_node in (
            (lambda call: (loose[call], args[call]), exact_of),
            (loose.__getitem__, self.loose.__getitem__),
        ):
            free: defaultdict[Hashable, deque[int]] = defaultdict(deque)
            for node in nodes:
                if node not in taken:
                    free[key_of_node(node)].append(node)
            for call in calls:
                queue = free.get(key_of_call(call)) if node_of[call] == ABSENT else None
                if queue:
                    node_of[call] = queue.popleft()
                    taken.add(node_of[call])

    def _new(self, structure: _Structure, call: int, parent: int) -> int:
        self.module.append(structure.run.module[call])
        self.parent.append(parent)
        self.loose.append((structure.run.module[call], structure.via[call]))
        self.args.append(structure.run.args[call])
        return len(self.module) - 1

    def aligned(self, classes: Sequence[RunClass], partings: Sequence[Parting]) -> Aligned:
        size = len(self.module)
        calls = [[*placed, *([ABSENT] * (size - len(placed)))] for placed in self.calls]
        columns = {
            name: [_pick(getattr(item.run, name), c) for item, c in zip(classes, calls, strict=True)]
            for name in ("args", "state", "out", "flags")
        }
        united: dict[Hashable, list[int]] = {}
        for k in range(len(classes)):
            united.setdefault(tuple(tuple(column[k]) for column in columns.values()), []).append(k)
        source = {
            RunClass(classes[ks[0]].run, tuple(sorted(m for k in ks for m in classes[k].members))): ks[0]
            for ks in united.values()
        }
        ordered = reference_first(source)
        kept = [source[item] for item in ordered]
        return Aligned(
            tuple(ordered),
            self.module,
            self.parent,
            **{name: tuple(column[k] for k in kept) for name, column in columns.items()},
            calls=tuple(calls[k] for k in kept),
            partings=tuple(partings),
        )


def count_of(column: Sequence[int], entry: int) -> int:
    return sum(map(eq, column, repeat(entry)))


def _by_parent(parents: Sequence[int], start: int) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for index in range(start, len(parents)):
        children.setdefault(parents[index], []).append(index)
    return children


def _pick(column: Sequence[int], calls: Sequence[int]) -> list[int]:
    padded = [*column, ABSENT]  # ABSENT as an index picks the last entry
    return [padded[call] for call in calls]


def _parting(reference: _Structure, other: _Structure, split: int, weight: int) -> Parting:
    def next_call(structure: _Structure) -> tuple[int, int | None]:
        run = structure.run
        return (run.parent[split], run.module[split]) if split < len(run.module) else (-1, None)

    (parent_a, lacking), (parent_b, extra) = next_call(reference), next_call(other)
    # Both parents are open when the runs part, so the one that began later lies inside the other.
    inner = max(parent_a, parent_b)
    modules = reference.run.module
    if inner < 0:
        return Parting(None, 0, extra, lacking, weight)
    return Parting(
        modules[inner],
        count_of(modules[:inner], modules[inner]),
        extra if parent_b == inner else None,
        lacking if parent_a == inner else None,
        weight,
    )
