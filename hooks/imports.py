"""Calls back when a module has been imported, without importing it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from typing import Any


class ImportWatch:
    """A finder that finds nothing of its own: it calls ``loaded(name)`` right after a module's code has run.

    Only modules of the top-level ``packages`` are looked at. The loader keeps its identity; its
    ``exec_module`` is wrapped for the one import.
    """

    def __init__(self, packages: Collection[str], loaded: Callable[[str], None]) -> None:
        self._packages = frozenset(packages)
        self._loaded = loaded
        self._on = False

    def start(self) -> None:
        self._on = True
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        self._on = False
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None or "exec_module" in getattr(loader, "__dict__", {"exec_module": None}):
            return  # a namespace package, a loader that is a class (built-in modules), or one watched already

        def exec_module(module: types.ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            original(module)
            if self._on:
                self._loaded(spec.name)

        loader.__dict__["exec_module"] = exec_module
