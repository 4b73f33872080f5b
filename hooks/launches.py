"""Which Triton kernels and custom operators each module ran: names and counts, no arguments."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from detaudit.hooks.dispatch import Watcher
from detaudit.hooks.imports import ImportWatch

KERNEL_CLASSES = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner"),
)
"""(module, class) whose ``run`` launches a Triton kernel: ``kernel[grid](...)``, and torch.compile's own."""

_TORCH = frozenset({"aten", "prim", "prims"})


class LaunchTap:
    """Counts launches and custom operators while it is on, in every module: ``with LaunchTap(...) as tap``.

    Triton is not imported for it; one that is imported meanwhile is seen from then on. Launches count in
    every thread, operators in this one. detaudit's own kernels are left out.

    Args:
        current_call: the innermost module call, or None outside of all modules.
    """

    def __init__(self, current_call: Callable[[], tuple[str, int] | None]) -> None:
        self._current_call = current_call
        self._counts: dict[str, Counter[str]] = {}
        self._runs: list[tuple[type, Any]] = []
        self._stack = ExitStack()

    def by_module(self) -> dict[str, dict[str, int]]:
        """Module path (empty for the root, and outside of modules) to name to count; JSON-compatible.

        Names are ``triton:KERNEL`` and ``operator:namespace.name.overload``.
        """
        return {module: dict(sorted(counts.items())) for module, counts in sorted(self._counts.items())}

    def __enter__(self) -> LaunchTap:
        with ExitStack() as stack:
            watch = ImportWatch({module.partition(".")[0] for module, _ in KERNEL_CLASSES}, self._imported)
            watch.start()
            stack.callback(watch.stop)
            stack.callback(self._put_back)
            for module, name in KERNEL_CLASSES:
                self._patch(module, name)
            stack.enter_context(_CustomOperators(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def count(self, name: str) -> None:
        at = self._current_call()
        self._counts.setdefault(at[0] if at else "", Counter())[name] += 1

    def _imported(self, name: str) -> None:
        for module, cls in KERNEL_CLASSES:
            if module == name:
                self._patch(module, cls)

    def _patch(self, module: str, name: str) -> None:
        cls: Any = vars(sys.modules[module]).get(name) if module in sys.modules else None
        original = vars(cls).get("run") if isinstance(cls, type) else None
        if original is None or any(cls is patched for patched, _ in self._runs):
            return
        tap, launch = self, original

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):  # a kernel without a name is no reason to fail the target
                if not kwargs.get("warmup") and not _ours(kernel):
                    tap.count(f"triton:{_name(kernel)}")
            return launch(kernel, *args, **kwargs)

        self._runs.append((cls, original))
        cls.run = run

    def _put_back(self) -> None:
        for cls, original in self._runs:
            cls.run = original  # type: ignore[attr-defined]
        self._runs.clear()


class _CustomOperators(Watcher):  # type: ignore[no-untyped-call]
    def __init__(self, tap: LaunchTap) -> None:
        super().__init__()
        self._tap = tap

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(func, "namespace", "aten") not in _TORCH:
            self._tap.count(f"operator:{func}")
        return func(*args, **kwargs)


def _name(kernel: Any) -> str:
    return str(getattr(kernel.fn, "__name__", kernel.fn))


def _ours(kernel: Any) -> bool:
    return str(getattr(kernel.fn, "__module__", "")).startswith("detaudit.")
