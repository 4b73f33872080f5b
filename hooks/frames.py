"""Calls as they are made, and how they become the recorded sequence when the run is over."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from detaudit.core.digest import Pending
from detaudit.core.recording import Call, Record, Value
from detaudit.hooks.calls import Entry
from detaudit.hooks.capture import CapturedCall
from detaudit.hooks.names import Place, Tree, join
from detaudit.hooks.observe import PendingRecord

REMOVED = "<removed>"


_NOTHING = PendingRecord()


class Deferred(Protocol):
    """Calls that are worked out when the run is over, and not while it waits."""

    def as_calls(self, mark: Frame) -> list[Frame]: ...

    def as_outermost(self) -> list[Frame]: ...


@dataclass(eq=False, slots=True)
class Frame:
    """One call, from the moment it is made.

    Args:
        place: whose call it is.
        via: as in ``Call``.
        recorded: False where --only or --exclude leave the call out; its children go to ``home``.
        home: the innermost recorded call, this one included.
        worker: made on another than the run's own thread, as the outermost call there.
        slot: how many calls of the run's own thread its parent held when it began.
        outermost: no call was open around it.
        inside_closed: it is a call of, or inside, a module compiled as a whole.
        rng: generator states on entry. ``before``, ``after``: inputs on entry and at the end (``seen_again``
            says whether they were looked at); ``state``, ``state_after`` likewise; ``out``: the output.
        deferred: set in a frame that only marks where a CUDA graph was replayed: its calls.
        listener: who was told that the call began, and is to be told that it ended.
        module, entry, args, kwargs, owner, closed: of an open call only; ``owner`` is whose state is its own.
    """

    place: Place
    via: str
    recorded: bool = True
    home: Frame | None = None
    worker: bool = False
    slot: int = 0
    outermost: bool = False
    inside_closed: bool = False
    live_ordinal: int = 0
    error: str | None = None
    seen_again: bool = False
    rng: PendingRecord = _NOTHING
    before: PendingRecord = _NOTHING
    after: PendingRecord = _NOTHING
    state: PendingRecord = _NOTHING
    state_after: PendingRecord = _NOTHING
    out: PendingRecord = _NOTHING
    children: list[Frame] = field(default_factory=list)
    captured: CapturedCall | None = None
    deferred: Deferred | None = None
    listener: object = None
    module: nn.Module | None = None
    entry: Entry | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    owner: nn.Module | None = None
    closed: bool = False

    def release(self) -> None:
        """The call is over: let go of what belongs to the target."""
        self.module = self.owner = self.entry = self.listener = None
        self.args, self.kwargs = (), {}

    def replayed(self, renew: Callable[[Pending], Pending], rng: PendingRecord) -> Frame:
        """This call and all inside it as one more CUDA graph replay.

        Args:
            renew: gives the replay's digest for one of the template.
            rng: generator states when the replay began.
        """
        fresh: dict[str, Any] = {name: _renewed(getattr(self, name), renew) for name in RECORDS}
        fresh["rng"] = rng
        children = [child.replayed(renew, rng) for child in self.children]
        return replace(self, via="graph", home=None, children=children, captured=None, **fresh)


RECORDS = ("rng", "before", "after", "state", "state_after", "out")


def _renewed(record: PendingRecord, renew: Callable[[Pending], Pending]) -> PendingRecord:
    return PendingRecord(
        [(site, renew(pending)) for site, pending in record.entries], list(record.unobserved)
    )


@dataclass(slots=True)
class Built:
    """The calls of a run in canonical order, and what went with them."""

    calls: list[Call]
    frames: list[Frame]
    unobserved: list[tuple[str, str, str]]
    alone: bool


def build(top: list[Frame], outermost: list[Frame], attached: bool) -> Built:
    """Calls in execution order, a parent before its children, from the outermost frames.

    The outermost calls of worker threads are sorted within the gap between their parent's other children in
    which they began: by module path, inputs, state and outputs. So the order in which threads were scheduled
    shows neither in the sequence nor in the ordinals. ``attached``: whether there is a model whose root has
    the empty path; if not, the only outermost module has it.
    """
    resolved: dict[int, _Resolved] = {}
    ordered = list(_in_order(top, -1, resolved))
    frames = [frame for frame, _ in ordered]
    # Outermost calls that --exclude leaves out have names all the same: those of the final output.
    alone = _number_trees([*_arranged(outermost, {}), *frames]) == 1 and not attached
    ordinals: Counter[str] = Counter()
    built = Built([], frames, [], alone)
    seen: dict[tuple[str, str, str], None] = {}
    for frame, parent in ordered:
        name, facts = frame.place.name(alone), resolved[id(frame)]
        built.calls.append(
            Call(
                name,
                frame.place.cls,
                ordinals[name],
                parent,
                facts.args,
                facts.state,
                facts.out,
                frame.via,
                frame.error,
            )
        )
        ordinals[name] += 1
        seen.update(dict.fromkeys((name, site, reason) for site, reason in facts.unobserved))
    built.unobserved = list(seen)
    return built


def expand(top: list[Frame], outermost: list[Frame]) -> None:
    """Put deferred calls in the places of their marks, in the lists and in all calls below ``top``."""
    outermost[:] = itertools.chain.from_iterable(
        [frame] if frame.deferred is None else frame.deferred.as_outermost() for frame in outermost
    )
    pending = [top]
    while pending:
        siblings = pending.pop()
        pending.extend(frame.children for frame in siblings if frame.children)
        if any(frame.deferred is not None for frame in siblings):
            siblings[:] = _expanded(siblings)


def _expanded(siblings: list[Frame]) -> list[Frame]:
    expanded: list[Frame] = []
    starts: list[int] = []  # of each call of the run's own thread, among those that there are afterwards
    own = 0
    for frame in siblings:
        calls = [frame] if frame.deferred is None else frame.deferred.as_calls(frame)
        expanded.extend(calls)
        if not frame.worker:
            starts.append(own)
            own += len(calls)
    starts.append(own)
    for frame in expanded:
        frame.slot = starts[frame.slot] if frame.worker else 0
    return expanded


def final_record(outermost: list[Frame], alone: bool) -> Record:
    """The outputs of the outermost calls, at sites as ``Recording.final`` describes."""
    resolved: dict[int, _Resolved] = {}
    arranged = _arranged(outermost, resolved)
    counts = Counter(frame.place.name(alone) for frame in arranged)
    ordinals: Counter[str] = Counter()
    record: list[tuple[str, Value]] = []
    for frame in arranged:
        name = frame.place.name(alone)
        prefix = join(name, f"call[{ordinals[name]}]" if counts[name] > 1 else "")
        ordinals[name] += 1
        record.extend((join(prefix, site), value) for site, value in frame.out.resolve()[0])
    return tuple(sorted(record, key=lambda entry: entry[0]))


@dataclass(frozen=True, slots=True)
class _Resolved:
    args: Record
    state: Record
    out: Record
    unobserved: tuple[tuple[str, str], ...]


def _resolve(frame: Frame) -> _Resolved:
    rng, missing_rng = frame.rng.resolve()
    before, missing_args = frame.before.resolve()
    state, missing_state = frame.state.resolve()
    out, missing_out = frame.out.resolve()
    after, missing_after = frame.after.resolve()
    state_after, missing_state_after = frame.state_after.resolve()
    changed: list[tuple[str, Value]] = []
    if frame.seen_again:
        changed.extend((f"mutated.{site}", value) for site, value in _changes(before, after))
        changed.extend(_changes(state, state_after))
    record = tuple(sorted((*out, *changed), key=lambda entry: entry[0])) if changed else out
    missing = (
        *missing_rng,
        *missing_args,
        *missing_state,
        *missing_out,
        *missing_after,
        *missing_state_after,
    )
    # "args" and "kwargs" sort before "rng", so this stays sorted.
    return _Resolved((*before, *rng), state, record, missing)


def _changes(before: Record, after: Record) -> Iterator[tuple[str, Value]]:
    """Sites whose value changed, came, or went."""
    if before == after:
        return
    old, new = dict(before), dict(after)
    for site, value in new.items():
        if old.get(site) != value:
            yield site, value
    for site in old:
        if site not in new:
            yield site, Value(b"\0" * 16, REMOVED)


def _in_order(
    siblings: list[Frame], parent: int, resolved: dict[int, _Resolved]
) -> Iterator[tuple[Frame, int]]:
    position = itertools.count()
    stack: list[tuple[Iterator[Frame], int]] = [(iter(_arranged(siblings, resolved)), parent)]
    while stack:
        frames, parent = stack[-1]
        frame = next(frames, None)
        if frame is None:
            stack.pop()
            continue
        if id(frame) not in resolved:
            resolved[id(frame)] = _resolve(frame)
        yield frame, parent
        stack.append((iter(_arranged(frame.children, resolved)), next(position)))


def _arranged(siblings: list[Frame], resolved: dict[int, _Resolved]) -> list[Frame]:
    if not any(frame.worker for frame in siblings):
        return siblings
    for frame in siblings:
        resolved.setdefault(id(frame), _resolve(frame))
    own = [frame for frame in siblings if not frame.worker]
    workers = [frame for frame in siblings if frame.worker]
    workers.sort(key=lambda frame: (frame.slot, _sort_key(frame, resolved[id(frame)])))
    arranged: list[Frame] = []
    for slot in range(len(own) + 1):
        while workers and workers[0].slot <= slot:
            arranged.append(workers.pop(0))
        arranged.extend(own[slot : slot + 1])
    return arranged + workers


def _sort_key(frame: Frame, facts: _Resolved) -> tuple[Any, ...]:
    tree = frame.place.tree
    digests = tuple(tuple((s, v.root) for s, v in record) for record in (facts.args, facts.state, facts.out))
    return (tree.prefix or "", tree.cls, frame.place.path, *digests, frame.error or "")


def _number_trees(frames: list[Frame]) -> int:
    """Number the trees that were not attached, in the order of their first calls, class by class."""
    numbers: Counter[str] = Counter()
    trees: dict[int, Tree] = {}
    for frame in frames:
        tree = frame.place.tree
        if id(tree) not in trees:
            trees[id(tree)] = tree
            if tree.prefix is None:
                tree.number = numbers[tree.cls]
                numbers[tree.cls] += 1
    return len(trees)
