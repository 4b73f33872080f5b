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
        self._observer.moment()
        frame.closed = closed
        frame.owner = frame.module if closed else innermost(frame.module)
        frame.rng = self._observer.observe(generator_states())
        frame.before = self._inputs(frame)
        frame.state = self._state(frame)

    def leave(self, frame: Frame, output: Any) -> None:
        """The output, and again the inputs and the own state: what the call changed in place."""
        self._observer.moment()
        frame.out = self._observer.observe(flatten(output, "out"))
        if frame.recorded:
            self._again(frame)

    def look_again(self, frame: Frame) -> None:
        """Inputs and own state of a call that raised."""
        self._observer.moment()
        self._again(frame)

    def _again(self, frame: Frame) -> None:
        frame.after = self._inputs(frame)
        frame.state_after = self._state(frame)
        frame.seen_again = True

    def _inputs(self, frame: Frame) -> PendingRecord:
        leaves = [*flatten(frame.args, "args"), *flatten(frame.kwargs, "kwargs")]
        return self._observer.observe(leaves)

    def _state(self, frame: Frame) -> PendingRecord:
        assert frame.owner is not None
        state = own_state(frame.owner, self._large_bytes, frame.closed)
        record = self._observer.observe(state.leaves)
        reason = f"its module's own state is over {self._large_bytes:,} bytes: digested around runs only"
        record.unobserved.extend((site, reason) for site, _ in state.large)
        return record
