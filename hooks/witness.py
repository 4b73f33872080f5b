"""What is observed of a call when it begins and when it ends."""

from __future__ import annotations

from typing import Any

from detaudit.core.digest import Digester
from detaudit.hooks.frames import Frame
from detaudit.hooks.names import innermost
from detaudit.hooks.observe import Observer, PendingRecord, generator_states
from detaudit.hooks.own_state import own_state
from detaudit.hooks.tree import flatten


class Witness:
    """Fills a frame's records. Used by one thread at a time, with the target's modes off (``unseen``)."""

    def __init__(self, digester: Digester, large_bytes: int) -> None:
        self._observer = Observer(digester)
        self._large_bytes = large_bytes

    def enter(self, frame: Frame, closed: bool) -> None:
        """Inputs, generator states and own state on entry. ``closed``: with that of all modules inside."""
        assert frame.module is not None
        frame.closed = closed
        frame.owner = frame.module if closed else innermost(frame.module)
        frame.rng = self.generators()
        frame.before = self._inputs(frame)
        frame.state = self._state(frame)
        self._observer.flush()

    def generators(self) -> PendingRecord:
        """States of torch's generators now."""
        return self._observer.observe(generator_states())

    def leave(self, frame: Frame, output: Any) -> None:
        """The output, and again the inputs and the own state: what the call changed in place."""
        frame.out = self._observer.observe(flatten(output, "out"))
        if frame.recorded:
            self._again(frame)
        self._observer.flush()

    def look_again(self, frame: Frame) -> None:
        """Inputs and own state of a call that raised."""
        self._again(frame)
        self._observer.flush()

    def _again(self, frame: Frame) -> None:
        frame.after = self._inputs(frame)
        frame.state_after = self._state(frame)
        frame.seen_again = True

    def _inputs(self, frame: Frame) -> PendingRecord:
        leaves = flatten(frame.args, "args")
        return self._observer.observe([*leaves, *flatten(frame.kwargs, "kwargs")] if frame.kwargs else leaves)

    def _state(self, frame: Frame) -> PendingRecord:
        assert frame.owner is not None
        state = own_state(frame.owner, self._large_bytes, frame.closed)
        record = self._observer.observe(state.leaves)
        if state.large:
            reason = f"its module's own state is over {self._large_bytes:,} bytes: digested around runs only"
            record.unobserved.extend((site, reason) for site, _ in state.large)
        return record
