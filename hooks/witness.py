"""What is observed of a call when it begins and when it ends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from detaudit.core.digest import Digester
from detaudit.hooks.frames import Frame
from detaudit.hooks.names import Place, innermost
from detaudit.hooks.observe import Observer, PendingRecord
from detaudit.hooks.own_state import Constant, own_state
from detaudit.hooks.tree import flatten

_MAX_PLACES = 1 << 16


class Witness:
    """Fills frames' records. Used by one thread at a time, with the target's modes off (``unseen``).

    Args:
        reads_generators: False where their states cannot be read, or say nothing.
    """

    def __init__(self, digester: Digester, large_bytes: int, reads_generators: bool = True) -> None:
        self.large_bytes = large_bytes
        self._reads_generators = reads_generators
        self._observer = Observer(digester)
        self._constant: dict[Place, tuple[Constant, PendingRecord]] = {}

    def begin(self) -> None:
        """A run begins."""
        self._observer.trim()
        if len(self._constant) > _MAX_PLACES:
            self._constant.clear()

    def enter(self, frame: Frame, closed: bool) -> None:
        """Inputs, generator states and own state on entry. ``closed``: with that of all modules inside."""
        assert frame.module is not None
        frame.closed = closed
        frame.owner = frame.module if closed else innermost(frame.module)
        if self._reads_generators:
            frame.rng = self._observer.generators()
        frame.before = self._inputs(frame)
        frame.state = self._state(frame)
        self._observer.flush()

    def generators(self) -> PendingRecord:
        """States of torch's generators now."""
        return self._observer.generators()

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
        leaves = arguments(frame.args)
        if frame.kwargs:
            leaves.extend(flatten(frame.kwargs, "kwargs"))
        return self._observer.observe(leaves)

    def _state(self, frame: Frame) -> PendingRecord:
        assert frame.owner is not None
        known = self._constant.get(frame.place)
        if known is not None and not frame.closed and known[0].holds(frame.owner):
            return known[1]
        state = own_state(frame.owner, self.large_bytes, frame.closed)
        record = self._observer.observe(state.leaves)
        if state.large:
            reason = f"its module's own state is over {self.large_bytes:,} bytes: digested around runs only"
            record.unobserved.extend((site, reason) for site, _ in state.large)
        elif not frame.closed and (constant := Constant.of(frame.owner)) is not None:
            self._constant[frame.place] = constant, record
        return record


_ARGUMENTS = [f"args[{index}]" for index in range(16)]


def arguments(args: tuple[Any, ...]) -> list[tuple[str, object]]:
    """``flatten(args, "args")``, faster for what modules are mostly handed: a few tensors."""
    if len(args) > len(_ARGUMENTS):
        return list(flatten(args, "args"))
    leaves: list[tuple[str, object]] = []
    for site, argument in zip(_ARGUMENTS, args, strict=False):
        if type(argument) is Tensor:
            leaves.append((site, argument))
        else:
            leaves.extend(flatten(argument, site))
    return leaves
