"""Copies of what one operator inside a module is handed, so that it can be called again alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from detaudit.core.recording import CallKey
from detaudit.hooks.capture import bytes_held, copy_of
from detaudit.hooks.dispatch import Watcher


class OperatorInputs(Watcher):  # type: ignore[no-untyped-call]
    """Keeps the arguments of one operator call: ``with inputs: model(x)``, on the run's thread.

    Afterwards ``args`` and ``kwargs`` hold copies made before it ran (strides and aliasing kept) and
    ``function`` the operator; or ``reason`` says why there is nothing.

    Args:
        call: the module call to count under, as `OperatorTap` was given.
        at, index, name: the operator, as `OperatorDifference` names it.
        budget: bytes that may be copied; ``bytes`` counts those that were.
    """

    def __init__(
        self, call: Callable[[], CallKey | None], at: CallKey, index: int, name: str, budget: int
    ) -> None:
        super().__init__()
        self.function: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.bytes = 0
        self.reason: str | None = f"{name} did not run there again"
        self._call = call
        self._at = at
        self._left = index
        self._name = name
        self._budget = budget

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._left >= 0 and self._call() == self._at:
            if self._left == 0 and str(func) == self._name:
                self._keep(func, args, kwargs)
            self._left -= 1
        return func(*args, **kwargs)

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        needed = bytes_held((args, kwargs))
        if needed > self._budget:
            self.reason = (
                f"the arguments of {self._name} hold {needed:,} bytes and {self._budget:,} may be kept; "
                "raise --capture-bytes"
            )
            return
        try:
            self.args, self.kwargs = copy_of((args, kwargs))
        except Exception as error:  # no memory for it, say: that is ours, and not the target's to suffer
            self.reason = f"the arguments of {self._name} could not be copied ({type(error).__name__})"
            return
        self.bytes = needed
        self.function, self.reason = func, None
