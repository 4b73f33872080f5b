"""Inputs and outputs of chosen calls, kept as copies within a budget of bytes."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from detaudit.hooks.copies import Storages
from detaudit.hooks.inputs import InputCopies
from detaudit.hooks.reach import reachable

CAPTURE_BYTES = 1 << 30


@dataclass(slots=True)
class CapturedCall:
    """What one call was handed (before it could change it) and what it returned, as independent copies.

    Strides and aliasing within the inputs, and within the output, are those of the originals. ``reason`` says
    why there is nothing, or only a part.
    """

    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    output: Any = None
    reason: str | None = None


class Captures:
    """Takes the copies; ``wanted`` are (module path, ordinal) pairs, ``budget`` counts bytes for all."""

    def __init__(self, wanted: Collection[tuple[str, int]], budget: int) -> None:
        self.wanted = frozenset(wanted)
        self._paths = frozenset(path for path, _ in self.wanted)
        self.budget = budget
        self._left = budget
        self._lock = threading.Lock()

    def wants(self, path: str, ordinal: int | None) -> bool:
        """Whether to keep this call; an ordinal that is not known yet (None) may turn out to be the one."""
        return (path, ordinal) in self.wanted or (ordinal is None and path in self._paths)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedCall:
        call = CapturedCall()
        handed = self._copy((args, kwargs), call, "inputs")
        if handed is not None:
            call.args, call.kwargs = handed
        return call

    def output(self, call: CapturedCall, value: Any) -> None:
        if call.reason is None:
            kept = self._copy((value,), call, "outputs")
            call.output = None if kept is None else kept[0]

    def _copy(self, value: tuple[Any, ...], call: CapturedCall, what: str) -> tuple[Any, ...] | None:
        size = bytes_held(value)
        with self._lock:
            if size > self._left:
                call.reason = (
                    f"its {what} hold {size:,} bytes and {self._left:,} of the capture budget of "
                    f"{self.budget:,} are left; raise --capture-bytes"
                )
                return None
            self._left -= size
        copied: tuple[Any, ...] = copy_of(value)
        return copied


def copy_of(value: Any) -> Any:
    """An independent copy of a tree of tensors; strides and aliasing stay."""
    return InputCopies(value).value


def bytes_held(value: object) -> int:
    """Bytes that a copy of the tensors reachable in ``value`` takes: whole storages, each counted once."""
    return Storages.bytes_needed(item for _, item in reachable("value", value) if isinstance(item, Tensor))
