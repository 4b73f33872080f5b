"""Records every module call of a run: inputs, outputs, own state, generator states, changes in place."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from detaudit.core.digest import Digester
from detaudit.core.recording import CallKey, ModuleInfo
from detaudit.hooks.calls import watch
from detaudit.hooks.capture import CAPTURE_BYTES, CapturedCall, Captures
from detaudit.hooks.graphs import LARGE_BYTES, GraphWatcher
from detaudit.hooks.names import Names, held_modules, join, named_modules
from detaudit.hooks.observe import Observer, PendingRecord
from detaudit.hooks.own_state import own_state
from detaudit.hooks.run import RecordedRun, Recording, note_foreign_threads
from detaudit.hooks.witness import Witness

__all__ = ["CallKey", "CapturedCall", "Recorder", "Recording", "held_modules"]


class Recorder:
    """Records runs of one model, or of whatever modules a script calls.

    Args:
        digester: takes the tensors; ``finish`` is called once when a run ends.
        only, exclude: globs over module paths. Calls left out are not recorded; their children belong to the
            nearest recorded call around them.
        large_bytes: a module whose own state holds more is digested without its largest tensors, which
            ``large_state`` digests instead.
        graphs: knows the CUDA graphs captured before; where none is given, those captured in its runs.

    Calls of threads that were alive already when this process made its first recorder are not recorded.
    Inputs of a call are kept alive until it returns.
    """

    def __init__(
        self,
        digester: Digester,
        *,
        only: Collection[str] = (),
        exclude: Collection[str] = (),
        large_bytes: int = LARGE_BYTES,
        graphs: GraphWatcher | None = None,
    ) -> None:
        self.digester = digester
        self.only = tuple(only)
        self.exclude = tuple(exclude)
        self.large_bytes = large_bytes
        self.graphs = graphs or GraphWatcher(digester)
        self._witness = Witness(digester, large_bytes)
        self._names = Names()
        self._last = self._names
        self._run: RecordedRun | None = None
        note_foreign_threads()

    def attach(self, model: object) -> None:
        """Name the modules of ``model``; again after a rebuild.

        A module's paths are those of its ``named_modules()``. Another object is searched for modules, which
        are named by the attributes that lead to them (``text_encoder.layers.0``). Where none is found, the
        outermost module called in a run is its root.
        """
        self._names = self._last = Names()
        for prefix, module in held_modules(model):
            self._names.add(module, prefix)

    def modules(self) -> tuple[ModuleInfo, ...]:
        """Every module of the attached model with its other names."""
        return self._names.infos()

    def module_at(self, path: str) -> nn.Module | None:
        """The module at ``path`` in the attached model, or met there in the last run, if still alive."""
        return self._last.module_at(path)

    def wants(self, path: str) -> bool:
        """Whether calls of the module at ``path`` are recorded."""
        if any(fnmatchcase(path, glob) for glob in self.exclude):
            return False
        return not self.only or any(fnmatchcase(path, glob) for glob in self.only)

    @contextlib.contextmanager
    def run(
        self,
        capture: Collection[CallKey] | None = None,
        substitute: Mapping[CallKey, Any] | None = None,
        *,
        capture_bytes: int = CAPTURE_BYTES,
    ) -> Iterator[Recording]:
        """Record what happens inside.

        Args:
            capture: calls whose inputs and outputs are kept, within ``capture_bytes`` for all of them.
            substitute: outputs that replace those of the calls named (the calls themselves are made). On a
                worker thread the ordinal counts calls as they happen to be made.

        Raises:
            UsageError: a recording is in progress already.
        """
        recording = Recording()
        self._witness.begin()
        run = RecordedRun(
            self._names.fork(),
            self._witness,
            self.wants,
            Captures(capture or (), capture_bytes),
            dict(substitute or {}),
            self.graphs.capture,
        )
        try:
            with watch(run, run.names.classes()) as wrappers, self.graphs.recording(run):
                run.wrappers = wrappers
                self._run, self._last = run, run.names
                yield recording
        finally:
            self._run = None
            run.over = True
            self.digester.finish()
            run.fill(recording)
            self._names.several = len(run.names.trees) > 1

    def current_call(self) -> CallKey | None:
        """(module path, ordinal) of the innermost recorded call open in this thread, for taps."""
        return None if self._run is None else self._run.current_call()

    def large_state(self) -> PendingRecord:
        """Digests of the own state that is too large for every call, at sites ``PATH:buffer.NAME``.

        To be taken before and after a run: of the attached model's modules and those met in the last run.
        """
        record = PendingRecord()
        observer = Observer(self.digester)
        for tree, ref in self._last.trees:
            for path, module in named_modules(root) if (root := ref()) is not None else ():
                name = join(tree.name(alone=not self._last.attached), path)
                large = own_state(module, self.large_bytes).large
                taken = observer.observe((f"{name}:{site}", tensor) for site, tensor in large)
                observer.flush()
                record.entries.extend(taken.entries)
                record.unobserved.extend(taken.unobserved)
        return record
