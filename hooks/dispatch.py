"""What every operator watcher stands on: a dispatch mode that changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode


class Watcher(TorchDispatchMode):
    """Sees each operator of this thread and runs it unchanged. Subclasses override ``operator``.

    Backward passes count as this thread's: autograd carries the modes over. Higher-order operators are passed
    on instead of refused, and what torch.compile does while it compiles is not shown.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Under any other mode torch.compile falls back to eager code, and so to other bits.
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _compiling():
            return func(*args, **(kwargs or {}))
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for each operator; must return ``func(*args, **kwargs)``."""
        return func(*args, **kwargs)


def _compiling() -> bool:
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None
