"""Executing a function target in this process, again and again from the same state."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from detaudit.core.digest import Digester, make_digester
from detaudit.core.errors import TargetInvalid
from detaudit.core.options import Options
from detaudit.core.recording import HOOKS_OFF, IN_PROCESS, Record, Run
from detaudit.hooks import generators
from detaudit.hooks.capture import CapturedCall
from detaudit.hooks.graphs import GraphWatcher
from detaudit.hooks.inputs import InputCopies
from detaudit.hooks.names import held_modules, named_modules
from detaudit.hooks.observe import PendingRecord, observe
from detaudit.hooks.parameters import gradient_record, parameter_record
from detaudit.hooks.recorder import Recorder
from detaudit.hooks.snapshot import Gradients, Snapshot
from detaudit.target import LoadedTarget, TargetSpec, check_inputs, check_model, import_context, target_errors

Unobserved = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution: what the trace keeps, and what a capture kept, by (module path, call)."""

    run: Run
    captured: Mapping[tuple[str, int], CapturedCall] = field(default_factory=dict)


class Session:
    """A built target, and all that is needed to run it again on identical inputs and state.

    A context manager: ``sys.path`` and ``sys.argv`` are the target's inside, and afterwards generators are as
    they were. ``condition`` names the recorded runs; ``position`` counts all.
    """

    def __init__(
        self, target: LoadedTarget, options: Options, *, condition: str = IN_PROCESS, process: int = 0
    ) -> None:
        self.target = target
        self.options = options
        self.condition = condition
        self.process = process
        self.position = 0
        self.rebuild = False
        self.initial = generators.capture()
        self.graphs = GraphWatcher()
        self._not_restored: dict[str, str] = {}
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._context.enter_context(import_context(self.target.spec))
        self._context.callback(generators.restore, self.initial)
        self._context.enter_context(self.graphs.armed())
        try:
            self.build()
        except BaseException:
            self._context.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def build(self) -> None:
        """Build the model from the generator states this session began with.

        Raises:
            TargetRaised, TargetInvalid: the factory raised, or what it returned cannot be called.
        """
        spec = self.target.spec
        generators.restore(self.initial)
        with self.graphs.building(), target_errors(spec, f"{spec.factory}() built the model"):
            self.model = self.target.build()
        check_model(self.target, self.model)
        self.modules = tuple(module for _, module in held_modules(self.model))
        for module in self.modules:
            _check_hashable(spec, module)
        # A graph captured just now holds digests of the digester that was made for it.
        self.digester: Digester = self.graphs.digester or make_digester(_device_of(self.modules))
        self.graphs.digester = self.digester
        self.recorder = Recorder(
            self.digester, only=self.options.only, exclude=self.options.exclude, graphs=self.graphs
        )
        self.recorder.attach(self.model)
        self.snapshot = Snapshot.take(*self.modules)
        self.gradients = Gradients(*self.modules)
        self.generators = generators.capture(
            self.model, vars(self.target.module), names=("model", self.target.module.__name__)
        )

    def module_at(self, path: str) -> nn.Module | None:
        """The module that reports call ``path``; its wrapper, where it has one. One that only the runs met is
        found while it is alive."""
        for prefix, root in held_modules(self.model):
            for found, module in named_modules(root, prefix):
                if found == path:
                    return module
        return self.recorder.module_at(path)

    def start_again(self, *, rebuild: bool) -> None:
        """Begin the sequence from the first run; with ``rebuild``, on a fresh model for every run."""
        self.position = 0
        self.rebuild = rebuild
        if rebuild:
            self.build()

    def release(self) -> None:
        """Let go of the model and its memory; nothing can be executed after that."""
        del self.model, self.modules, self.recorder, self.snapshot, self.gradients, self.generators
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know about how digests were taken."""
        return (*self.digester.notes, *self.graphs.notes)

    def restored(self) -> dict[str, Any]:
        """What is put back before each run, and what could not be; for the report."""
        return {
            "generators": self.generators.describe() | self._not_restored,
            "buffers": self.snapshot.describe(),
            "inputs": "made afresh and copied for every run",
            "gradients": "as they were after the model was built",
            "model": "rebuilt for every run" if self.rebuild else "built once",
        }

    def execute(
        self,
        *,
        recorded: bool = True,
        parameters: bool = False,
        condition: str | None = None,
        capture: Iterable[tuple[str, int]] = (),
        substitute: Mapping[tuple[str, int], Any] | None = None,
        around: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Execution:
        """One run from the same state as every other.

        Args:
            recorded: with hooks; otherwise only the final output is digested.
            parameters: whether these are digested before and after the run.
            condition: in place of the session's own.
            capture: calls of which inputs and outputs are kept.
            substitute: outputs that replace those of the calls named.
            around: entered around the target alone (a tap).

        Raises:
            TargetRaised, TargetInvalid: the message says in which run.
        """
        if self.rebuild and self.position:
            self.build()
        position, spec = self.position, self.target.spec
        self._put_back()
        with target_errors(spec, f"make_inputs() made the inputs of run {position + 1}"):
            made = self.target.make_inputs()
        check_inputs(self.target, made)
        copies = InputCopies(made)
        pending = {"inputs": observe(copies.value, "inputs", self.digester)}
        pending |= self._around("start", "before", recorded, parameters)
        recording = None
        with contextlib.ExitStack() as stack:
            if not self.target.wants_grad:
                stack.enter_context(torch.no_grad())
            if recorded:
                budget = self.options.capture_bytes
                recorder_run = self.recorder.run(set(capture), substitute, capture_bytes=budget)
                recording = stack.enter_context(recorder_run)
            stack.enter_context(around or contextlib.nullcontext())
            stack.enter_context(target_errors(spec, f"it ran (run {position + 1})"))
            begun = time.perf_counter()
            output = self.target.run(self.model, copies.value)
            seconds = time.perf_counter() - begun
        self.position += 1
        pending |= self._around("end", "after", recorded, parameters)
        pending["final"] = observe(output, "out", self.digester)
        pending["grad"] = gradient_record(self.digester, *self.modules)
        records, unobserved = settle(self.digester, pending)
        run = Run(
            condition=(condition or self.condition) if recorded else HOOKS_OFF,
            position=position,
            process=self.process,
            calls=recording.calls if recording else (),
            records=records,
            unobserved=unobserved + (recording.unobserved if recording else ()),
            seconds=seconds,
        )
        return Execution(run, recording.captured if recording else {})

    def _put_back(self) -> None:
        self._not_restored = {n: f"not put back: {why}" for n, why in generators.restore(self.generators)}
        self.generators = generators.adopt(self.generators)
        self.snapshot.restore()
        self.gradients.restore()

    def _around(self, large: str, moment: str, recorded: bool, parameters: bool) -> dict[str, PendingRecord]:
        """State that is digested around a run only: what is too large for every call, and parameters."""
        pending = {}
        if recorded:
            pending[f"large.{large}"] = self.recorder.large_state()
        if parameters:
            pending[f"parameters.{moment}"] = parameter_record(self.digester, *self.modules)
        return pending


def _check_hashable(spec: TargetSpec, root: nn.Module) -> None:
    for path, module in named_modules(root):
        if type(module).__hash__ is None:
            raise TargetInvalid(
                f"{spec.path}: {path or 'the model'} ({type(module).__name__}) has no hash, without which "
                "torch cannot walk through a model; if it is a dataclass, declare it with eq=False"
            )


def settle(digester: Digester, pending: Mapping[str, PendingRecord]) -> tuple[dict[str, Record], Unobserved]:
    """Finish the digests; records by name (an empty one only for ``final``), and what could not be seen."""
    digester.finish()
    records: dict[str, Record] = {}
    unobserved: list[tuple[str, str, str]] = []
    for name, item in pending.items():
        record, missing = item.resolve()
        if record or name == "final":
            records[name] = record
        for site, reason in missing:
            # The final output has a name of its own: the root's "out" is that of the root's call.
            unobserved.append(("", site.replace("out", name, 1) if name == "final" else site, reason))
    return records, tuple(unobserved)


def _device_of(modules: tuple[nn.Module, ...]) -> torch.device:
    """The first accelerator that a parameter or buffer lies on; where there is none, CUDA if it is in use."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type == "cuda":
                return tensor.device
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]
