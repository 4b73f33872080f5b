"""Which call of one run corresponds to which call of another.

Runs with the same sequence of (module, parent, via) correspond by index. Where the sequences part, an equal
end still does. Every call between is matched under its parent: first with a call of the same module on the
same arguments, then with the next free call of the same module. What stays unmatched is a node of its own,
which the other runs lack. Wrong matches cost completeness, never correctness: a call is judged only where two
runs gave the same module the same inputs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count, groupby, islice, repeat
from operator import add, eq, gt, mul, ne

from detaudit.compare.classes import RunClass, reference_first
from detaudit.core.recording import RunColumns, TraceView

ABSENT = -1
"""In a column: this class has no such call."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a class takes another way than the reference: the innermost module around the first difference.

    ``module`` is an index into ``TraceView.modules``, ``None`` outside of all modules. ``extra`` and
    ``lacking`` are the modules that it calls next in this class and in the reference, where it does.
    ``split``: the node from which on the class may differ from the reference.
    """

    module: int | None
    call: int
    extra: int | None
    lacking: int | None
    weight: int
    split: int


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

    def call(self, k: int, node: int) -> int:
        """Index of the node's call in the run of class ``k``."""
        calls = self.calls[k]
        return node if calls is None else calls[node]

    def position(self, node: int) -> int:
        """Index of the node's call in the first class that has it: earlier calls come first."""
        return node if not self.partial else self.call(self.present(node)[0], node)

    def ancestors(self, node: int) -> Iterator[int]:
        """The enclosing nodes, innermost first."""
        node = self.parent[node]
        while node >= 0:
            yield node
            node = self.parent[node]

    def unmatched(self) -> list[int]:
        """Nodes that some class lacks."""
        missing: set[int] = set()
        for column in self.args if self.partial else ():
            missing.update(compress(count(), map(eq, column, repeat(ABSENT))))
        return sorted(missing)

    def weight(self, node: int) -> int:
        """How many runs have the node."""
        return sum(self.classes[k].weight for k in self.present(node))

    def ordinal(self, node: int) -> int:
        """Which call of its module the node is, in the first class that has it."""
        k = self.present(node)[0]
        return count_of(self.classes[k].run.module[: self.call(k, node)], self.module[node])

    def children(self, node: int) -> list[int]:
        """The calls made directly by ``node``."""
        later = islice(self.parent, node + 1, None)
        return list(compress(count(node + 1), map(eq, later, repeat(node))))


def align(view: TraceView, classes: Sequence[RunClass]) -> Aligned:
    """Lay the classes, the reference first, over one another. Linear in the number of calls."""
    if not classes:
        return Aligned((), (), (), (), (), (), (), ())
    reference = classes[0].run
    structures = [_Structure(item.run, view.flags) for item in classes]
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

    def __init__(self, run: RunColumns, flags: Sequence[tuple[str, str | None]]) -> None:
        self.run = run
        self._vias = [via for via, _ in flags]

    @cached_property
    def kinds(self) -> Sequence[int]:
        """For each call one number for its module and how it was called; calls of one kind can correspond."""
        names = sorted(set(self._vias))
        if len(names) < 2:
            return self.run.module
        number = [names.index(via) for via in self._vias]
        scaled = map(mul, self.run.module, repeat(len(names)))
        return list(map(add, scaled, map(number.__getitem__, self.run.flags)))

    def equals(self, other: _Structure) -> bool:
        a, b = self.run, other.run
        if a.module != b.module or a.parent != b.parent:
            return False
        return a.flags == b.flags or self.kinds == other.kinds

    def split(self, other: _Structure) -> int:
        """The first call that differs; the length of the shorter where one continues the other."""
        pairs = ((self.kinds, other.kinds), (self.run.parent, other.run.parent))
        shorter = min(len(self.run.module), len(other.run.module))
        return min(next(compress(count(), map(ne, a, b)), shorter) for a, b in pairs)

    def tail(self, other: _Structure, split: int) -> int:
        """How many calls at the end are the same in both, from one on whose parent comes before ``split``."""
        mine, theirs = self.run.parent, other.run.parent
        shorter = min(len(mine), len(theirs)) - split
        same = next(compress(count(), map(ne, reversed(self.kinds), reversed(other.kinds))), shorter)
        start, shift = len(mine) - min(same, shorter), len(theirs) - len(mine)
        moved = [parent if parent < split else parent + shift for parent in mine[start:]]
        last_apart = max(compress(count(start), map(ne, moved, theirs[start + shift :])), default=start - 1)
        begin = last_apart + 1
        outermost = map(gt, repeat(split), mine[begin:])
        return len(mine) - next(compress(count(begin), outermost), len(mine))


class _Tree:
    """The union of the calls of all classes, grown class by class from the reference."""

    def __init__(self, reference: _Structure) -> None:
        self.reference = reference
        self.module = list(reference.run.module)
        self.parent = list(reference.run.parent)
        self.kinds = list(reference.kinds)
        self.args = list(reference.run.args)
        self.children = _by_parent(self.parent, range(len(self.parent)))
        self.calls: list[list[int]] = []

    def add(self, structure: _Structure) -> int | None:
        """Match the calls of one class. Returns the first that differs from the reference's, if any does."""
        size, known = len(structure.run.module), len(self.reference.run.module)
        if structure.equals(self.reference):
            self.calls.append(list(range(size)))
            return None
        split = structure.split(self.reference)
        tail = structure.tail(self.reference, split)
        between = range(split, size - tail)
        node_of = [*range(split), *[ABSENT] * len(between), *range(known - tail, known)]
        for parent, calls in _by_parent(structure.run.parent, between).items():
            node = node_of[parent] if parent >= 0 else -1
            nodes = self.children.get(node, [])
            if parent < split:
                nodes = [child for child in nodes if split <= child < known - tail or child >= known]
            if [structure.kinds[call] for call in calls] == [self.kinds[child] for child in nodes]:
                for call, child in zip(calls, nodes, strict=True):
                    node_of[call] = child
            else:
                self._match(structure, calls, nodes, node_of)
                self._grow(structure, [call for call in calls if node_of[call] == ABSENT], node, node_of)
        placed = [ABSENT] * len(self.module)
        for call, node in enumerate(node_of):
            placed[node] = call
        self.calls.append(placed)
        return split

    def _match(self, structure: _Structure, calls: list[int], nodes: list[int], node_of: list[int]) -> None:
        """Fill ``node_of`` for the calls of one parent: the k-th of a kind goes to the k-th node of it.

        Calls on the same arguments find each other first.
        """
        kinds, args = structure.kinds, structure.run.args
        taken: set[int] = set()
        for same_args in (True, False):
            free: defaultdict[Hashable, deque[int]] = defaultdict(deque)
            for node in nodes:
                if node not in taken:
                    free[self.kinds[node], same_args and self.args[node]].append(node)
            for call in calls:
                queue = free.get((kinds[call], same_args and args[call]))
                if node_of[call] == ABSENT and queue:
                    node_of[call] = queue.popleft()
                    taken.add(node_of[call])

    def _grow(self, structure: _Structure, calls: list[int], parent: int, node_of: list[int]) -> None:
        """New nodes for calls that no node corresponds to."""
        for call in calls:
            node_of[call] = len(self.module)
            self.children.setdefault(parent, []).append(len(self.module))
            self.module.append(structure.run.module[call])
            self.parent.append(parent)
            self.kinds.append(structure.kinds[call])
            self.args.append(structure.run.args[call])

    def aligned(self, classes: Sequence[RunClass], partings: Sequence[Parting]) -> Aligned:
        size = len(self.module)
        calls = [[*placed, *([ABSENT] * (size - len(placed)))] for placed in self.calls]
        columns = {
            name: [_pick(getattr(item.run, name), c) for item, c in zip(classes, calls, strict=True)]
            for name in ("args", "state", "out")
        }
        columns["flags"] = _flags([item.run.flags for item in classes], calls)
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


def _by_parent(parents: Sequence[int], calls: range) -> dict[int, list[int]]:
    """Those calls under each parent, parents ascending."""
    ordered = sorted(calls, key=parents.__getitem__)
    return {parent: list(children) for parent, children in groupby(ordered, key=parents.__getitem__)}


def _flags(columns: Sequence[Sequence[int]], calls: Sequence[Sequence[int]]) -> list[list[int]]:
    """As ``_pick`` for each class; one and the same column where all calls ended alike, as they mostly do."""
    all_flags = set().union(*columns)
    if len(all_flags) == 1:
        return [[*all_flags] * len(calls[0])] * len(calls)
    return [_pick(column, c) for column, c in zip(columns, calls, strict=True)]


def _pick(column: Sequence[int], calls: Sequence[int]) -> list[int]:
    padded = [*column, ABSENT]  # ABSENT as an index picks the last entry
    return list(map(padded.__getitem__, calls))


def _parting(reference: _Structure, other: _Structure, split: int, weight: int) -> Parting:
    def next_call(structure: _Structure) -> tuple[int, int | None]:
        run = structure.run
        return (run.parent[split], run.module[split]) if split < len(run.module) else (-1, None)

    (parent_a, lacking), (parent_b, extra) = next_call(reference), next_call(other)
    # Both parents are open when the runs part, so the one that began later lies inside the other.
    inner = max(parent_a, parent_b)
    modules = reference.run.module
    if inner < 0:
        return Parting(None, 0, extra, lacking, weight, split)
    return Parting(
        modules[inner],
        count_of(modules[:inner], modules[inner]),
        extra if parent_b == inner else None,
        lacking if parent_a == inner else None,
        weight,
        split,
    )
