"""What every operator watcher stands on: a dispatch mode that changes nothing."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watcher(TorchDispatchMode):
    """Sees each operator of this thread and runs it unchanged. Subclasses override ``operator``.

    A compiled target stays compiled: without ``ignore_compile_internals`` torch.compile would run its code
    eagerly under a mode, and so compute other bits. Higher-order operators are passed on instead of refused.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.operator(func, args, kwargs or {})

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for each operator; must return ``func(*args, **kwargs)``."""
        return func(*args, **kwargs)
