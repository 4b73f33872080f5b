"""The calls of a CUDA graph: seen once, while it was captured, and made again by every replay.

At capture a call's tensors get digests in the graph's own slots; a replay is the same calls with the digests
that it left there. What lies on the host when a graph is captured is not what a replay would find there, so
host tensors are unobserved; host scalars are constants of the graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from detaudit.core.device.queue import CapturedPending
from detaudit.core.digest import Pending, Ready
from detaudit.core.recording import SCALAR_PREFIX
from detaudit.hooks.frames import RECORDS, Frame
from detaudit.hooks.names import Names, Place
from detaudit.hooks.observe import PendingRecord

HOST_TENSOR = "a host tensor of a call in a CUDA graph, which replays may find changed"


@dataclass(eq=False, slots=True)
class Template:
    """Calls made while one graph was captured.

    Args:
        top, outermost: as in the run that saw them; their digests are places in the graph's slots.
        modules: whose calls they are, by ``id`` of the frame; weak, since a module may hold its graph.
        closed: modules of which the inside is not seen, with the reason.
        notes: what else could not be seen in the graph, and why.
    """

    top: list[Frame] = field(default_factory=list)
    outermost: list[Frame] = field(default_factory=list)
    modules: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    closed: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """The capture is over: keep only what holds for a replay too."""
        seen: set[int] = set()
        pending = [*self.top, *self.outermost]
        while pending:
            frame = pending.pop()
            if id(frame) not in seen:
                seen.add(id(frame))
                pending.extend(frame.children)
                frame.rng = PendingRecord()
                for name in RECORDS:
                    setattr(frame, name, _lasting(getattr(frame, name)))

    def placed(self, names: Names, wants: Callable[[str], bool]) -> Placed:
        """The calls under the names of one run, without those it does not record."""
        placing = _Placing(self, names, wants)
        top = [found for frame in self.top for found in placing.calls(frame)]
        outermost = [found for frame in self.outermost if (found := placing.outermost(frame)) is not None]
        notes = list(self.notes)
        if placing.gone:
            notes.append(f"{placing.gone} calls in a CUDA graph are of modules that are gone")
        return Placed(top, outermost, notes, names)


def _lasting(record: PendingRecord) -> PendingRecord:
    kept = PendingRecord([], list(record.unobserved))
    for site, pending in record.entries:
        if isinstance(pending, CapturedPending) or _is_scalar(pending):
            kept.entries.append((site, pending))
        else:
            kept.unobserved.append((site, HOST_TENSOR))
    return kept


def _is_scalar(pending: Pending) -> bool:
    return isinstance(pending, Ready) and pending.value.dtype.startswith(SCALAR_PREFIX)


class _Placing:
    def __init__(self, template: Template, names: Names, wants: Callable[[str], bool]) -> None:
        self._modules = template.modules
        self._names = names
        self._wants = wants
        self.gone = 0

    def calls(self, frame: Frame) -> Iterator[Frame]:
        children = [found for child in frame.children for found in self.calls(child)]
        place = self._place(frame)
        if place is None:
            self.gone += 1
        if place is not None and place.wanted and frame.recorded:
            yield replace(frame, place=place, children=children, via="graph")
        else:
            yield from children

    def outermost(self, frame: Frame) -> Frame | None:
        place = self._place(frame)
        return None if place is None else replace(frame, place=place, children=[], via="graph")

    def _place(self, frame: Frame) -> Place | None:
        module = self._modules[id(frame)]()
        if module is None:
            return None
        place = self._names.find(module)
        if place.wanted is None:
            place.wanted = self._wants(self._names.live_name(place))
        return place


@dataclass(eq=False, slots=True)
class Placed:
    """A template under the names of one run."""

    top: list[Frame]
    outermost: list[Frame]
    notes: list[str]
    names: Names
    _counts: dict[int, Counter[str]] = field(default_factory=dict)

    def below(self, home: Frame | None) -> list[Frame]:
        """The calls as children of ``home``. Where the graph is what that very call consists of
        (``make_graphed_callables``), the template's only outermost call is that call, not one more."""
        if home is not None and len(self.top) == 1 and self.top[0].place is home.place:
            return self.top[0].children
        return self.top

    def counts(self, calls: list[Frame]) -> Counter[str]:
        """Number of calls by module name, of one of the lists that ``below`` gives."""
        found = self._counts.get(id(calls))
        if found is None:
            found = self._counts[id(calls)] = Counter(self._live_names(calls))
        return found

    def _live_names(self, frames: list[Frame]) -> Iterator[str]:
        for frame in frames:
            yield self.names.live_name(frame.place)
            yield from self._live_names(frame.children)


@dataclass(eq=False, slots=True)
class Replay:
    """One replay, worked out when the run is over. ``digests``: by place in the graph's slots."""

    placed: Placed
    calls: list[Frame]
    digests: Sequence[Pending]
    rng: PendingRecord

    def as_calls(self, mark: Frame) -> list[Frame]:
        """The calls of this replay, at the place of ``mark`` in the run."""
        frames = [self._renewed(frame) for frame in self.calls]
        for frame in frames:
            frame.worker, frame.slot = mark.worker, mark.slot
        return frames

    def as_outermost(self) -> list[Frame]:
        return [self._renewed(frame) for frame in self.placed.outermost]

    def _renewed(self, frame: Frame) -> Frame:
        return frame.replayed(self._digest, self.rng)

    def _digest(self, pending: Pending) -> Pending:
        return self.digests[pending.index] if isinstance(pending, CapturedPending) else pending
