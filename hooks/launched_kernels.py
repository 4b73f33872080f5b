"""Which GPU kernels each module launched, by name, from torch's profiler (CUPTI).

Every module call is a range on the host; a launch belongs to the innermost range open on its thread when it
was made, and a kernel to its launch by CUPTI's correlation id. That covers whatever launches kernels: torch,
libraries, JIT modules, Triton. The kernels of a CUDA graph belong to the module that replays it.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from detaudit.core.errors import Unsupported
from detaudit.hooks.calls import Entry, watch
from detaudit.hooks.names import Names, held_modules

PREFIX = "detaudit module: "
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_KERNEL, _RANGE = "kernel", "user_annotation"

Launched = dict[str | None, dict[str, int]]


class LaunchedKernels:
    """Counts what is launched inside: ``with LaunchedKernels(model) as launched: model(x)``.

    Work that is under way when the block begins is waited for, and the block's own when it ends.

    Raises:
        UsageError: a recording is in progress in this process.
        Unsupported: on leaving, if a GPU is there and the profiler saw no kernel although one was launched.
    """

    def __init__(self, model: object) -> None:
        self._names = Names()
        self._profiler = torch.profiler.profile()
        for prefix, module in held_modules(model):
            self._names.add(module, prefix)
        self._found: Launched = {}
        self._stack = ExitStack()

    def by_module(self) -> Launched:
        """Module path (None: outside of all modules) to kernel name, as the profiler has it, to launches."""
        return self._found

    def __enter__(self) -> LaunchedKernels:
        _synchronize()
        with ExitStack() as stack:
            stack.enter_context(watch(_Ranges(self._names), self._names.classes()))
            stack.enter_context(self._profiler)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack:
            _synchronize()
        if error[0] is None:
            self._found = launched(_events(self._profiler))


class _Ranges:
    """Opens a range for every call of a module that has a name."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def open(
        self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> record_function | None:
        place = self._names.known(module)
        if place is None:
            return None
        opened = record_function(PREFIX + self._names.live_name(place))
        opened.__enter__()  # type: ignore[no-untyped-call]
        return opened

    def close(self, frame: record_function, output: Any) -> Any:
        frame.__exit__(None, None, None)
        return output

    def fail(self, frame: record_function, error: BaseException) -> None:
        frame.__exit__(None, None, None)


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _events(profiler: torch.profiler.profile) -> list[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="detaudit-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
    # Kineto writes control characters of kernel names as they are.
    events: list[Mapping[str, Any]] = json.loads(text, strict=False)["traceEvents"]
    return events


def launched(events: Iterable[Mapping[str, Any]]) -> Launched:
    """Kernels by module, from the events of a Chrome trace as Kineto writes it.

    Raises:
        Unsupported: launches were seen and not one kernel, as where CUPTI may not be used.
    """
    kept = [event for event in events if event.get("ph") == "X"]
    module_of = _launching_modules(kept)
    found: dict[str | None, Counter[str]] = defaultdict(Counter)
    for event in kept:
        if event.get("cat") == _KERNEL:
            found[module_of.get(_correlation(event))][str(event["name"])] += 1
    if not found and any("Launch" in str(event["name"]) for event in kept if event.get("cat") in _LAUNCHES):
        raise Unsupported(
            "the profiler saw launches but no kernel: CUPTI cannot be used here; end other profilers, "
            "and let the driver allow performance counters to this user"
        )
    return {module: dict(counts) for module, counts in found.items()}


def _launching_modules(events: Iterable[Mapping[str, Any]]) -> dict[object, str | None]:
    """Correlation id of each launch to the innermost module open on its thread at that time."""
    threads: dict[object, list[tuple[float, float, Mapping[str, Any]]]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category in _LAUNCHES or (category == _RANGE and name.startswith(PREFIX)):
            begin, duration = float(event["ts"]), float(event.get("dur", 0))
            threads[event.get("tid")].append((begin, -duration, event))
    modules: dict[object, str | None] = {}
    for listed in threads.values():
        listed.sort(key=lambda item: item[:2])  # an enclosing range before what begins with it
        open_: list[tuple[float, str]] = []
        for begin, minus_duration, event in listed:
            while open_ and open_[-1][0] < begin:
                open_.pop()
            if event.get("cat") == _RANGE:
                open_.append((begin - minus_duration, str(event["name"])[len(PREFIX) :]))
            else:
                modules[_correlation(event)] = open_[-1][1] if open_ else None
    return modules


def _correlation(event: Mapping[str, Any]) -> object:
    return (event.get("args") or {}).get("correlation")
