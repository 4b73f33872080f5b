"""Sources: calls that gave different outputs for the same inputs. Origins: sources with no source inside.

Millions of calls are sifted by C-level iteration over whole columns; Python looks only at the calls that two
runs entered with equal inputs and any two runs left with different outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import compress, count, repeat
from operator import add, and_, gt, lt, mul

from detaudit.compare.align import Aligned

Inherited = Callable[[int], Sequence[Hashable]]
"""For a node, what beyond arguments and own state it was entered with: one key per class."""


def distinct(columns: Sequence[Sequence[object]]) -> Iterable[int]:
    """For each row across the columns, how many different entries it has."""
    return map(len, map(set, zip(*columns, strict=True)))


def all_equal(columns: Sequence[Sequence[int]]) -> bool:
    return all(column is columns[0] or column == columns[0] for column in columns[1:])


def unequal(columns: Sequence[Sequence[int]]) -> Iterable[int]:
    """Rows whose entries are not all the same, ascending."""
    return () if all_equal(columns) else compress(count(), map(gt, distinct(columns), repeat(1)))


def candidates(aligned: Aligned) -> list[int]:
    """Nodes that classes left with more different (inputs, outputs) than they entered with inputs.

    The cheaper question comes first: are outputs not all equal, and inputs not all different?
    """
    inputs = _paired(aligned.args, aligned.state)
    outputs = _paired(aligned.out, aligned.flags)
    some_differ = map(gt, distinct(outputs), repeat(1))
    some_agree = map(lt, distinct(inputs), repeat(len(inputs)))
    mask = list(map(and_, some_differ, some_agree))
    inputs = [list(compress(column, mask)) for column in inputs]
    pairs = [
        list(zip(column, compress(out, mask), strict=True))
        for column, out in zip(inputs, outputs, strict=True)
    ]
    more_pairs = map(gt, distinct(pairs), distinct(inputs))
    return list(compress(compress(count(), mask), more_pairs))


def groups(aligned: Aligned, node: int, inherited: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Classes that entered the node with the same inputs, and left it with different outputs among them."""
    by_inputs: dict[Hashable, list[int]] = {}
    for k in aligned.present(node):
        more = inherited[k] if inherited else None
        by_inputs.setdefault((aligned.args[k][node], aligned.state[k][node], more), []).append(k)
    return [ks for ks in by_inputs.values() if len({outcome(aligned, k, node) for k in ks}) > 1]


def outcome(aligned: Aligned, k: int, node: int) -> tuple[int, int]:
    """What class ``k`` left the node with: its output record, and how it ended."""
    return aligned.out[k][node], aligned.flags[k][node]


def innermost(aligned: Aligned, sources: Collection[int]) -> list[int]:
    """Sources with no source inside.

    A later call of a module is passed over too where an earlier call of it held a source: what that left
    behind, unseen, may have come out again.
    """
    around: set[int] = set()
    held_since: dict[int, int] = {}
    at = {source: aligned.position(source) for source in sources}
    for source in sorted(sources, key=at.__getitem__):
        for node in aligned.ancestors(source):
            if node in around:
                break
            around.add(node)
            held_since.setdefault(aligned.module[node], at[source])
    return [
        node
        for node in sorted(sources)
        if node not in around and held_since.get(aligned.module[node], at[node]) >= at[node]
    ]


def _paired(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """One key per entry for both; the second is left out where it never differs between classes."""
    if all_equal(second):
        return first
    factor = max(map(max, second)) + 2  # entries start at ABSENT, which is -1
    return [list(map(add, map(mul, a, repeat(factor)), b)) for a, b in zip(first, second, strict=True)]
