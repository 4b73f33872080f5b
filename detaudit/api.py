"""The Python interface: audit a module, a function or a target file from a program of one's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detaudit import auditing
from detaudit.core.errors import TargetInvalid, UsageError
from detaudit.core.recording import HOOKS_OFF, IN_PROCESS
from detaudit.core.records import Report
from detaudit.options import DEFAULT_CAPTURE_BYTES, DEFAULT_KERNEL_RUNS, DEFAULT_RUNS, Options
from detaudit.progress import Progress
from detaudit.target import LoadedTarget, TargetSpec, resolve

HISTORY = "history"
CONDITIONS = (IN_PROCESS, HOOKS_OFF, HISTORY)
"""``in-process``: the recorded runs, always made. ``hooks-off``: some runs without recording among them.
``history``: when something differs, the same sequence in two fresh processes (target files only)."""


def audit(
    target: str | os.PathLike[str] | Callable[..., Any],
    inputs: Any = None,
    *,
    runs: int = DEFAULT_RUNS,
    conditions: Sequence[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    confirm: bool = True,
    kernel_runs: int = DEFAULT_KERNEL_RUNS,
    capture_bytes: int = DEFAULT_CAPTURE_BYTES,
    grad: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run a target again and again on identical inputs and state, and find the first module that differs.

    Before each run the inputs are copied, and buffers, gradients and the states of Python's, NumPy's and
    torch's generators are put back. What was put back is in ``report.restored``.

    Args:
        target: an ``nn.Module``, any other callable, or the path of a target file (``"model.py"``,
            ``"model.py:factory"``). The modules recorded are those that a callable is, belongs to, or
            refers to in its closure and its globals, and all others it calls.
        inputs: of a callable: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a
            function without parameters that returns one of these afresh for every run.
        runs: recorded runs; at least two, or nothing is compared.
        conditions: of ``CONDITIONS``; by default all that the target can be run under.
        trace: where to keep the trace (never overwritten), with captured calls in ``<trace>.d`` beside it.
            Without it, nothing is kept but the report.
        only, exclude: globs over module paths; what they leave out is not recorded.
        confirm: whether kernels found at fault are rerun alone, ``kernel_runs`` times for each variant.
        capture_bytes: most bytes of tensors kept at a time when origins are captured.
        grad: whether a callable runs with gradients enabled; a target file says so itself.
        progress: told what is going on.

    Raises:
        UsageError: arguments that cannot be meant together.
        TargetRaised, TargetInvalid, TargetNotFound: the target cannot be run.
        TraceNotWritten: ``trace`` exists, or cannot be written.
    """
    is_file = isinstance(target, (str, os.PathLike))
    options = Options(
        runs=runs,
        only=tuple(only),
        exclude=tuple(exclude),
        history=HISTORY in (wanted := _conditions(conditions, is_file)),
        observer=HOOKS_OFF in wanted,
        confirm=confirm,
        kernel_runs=kernel_runs,
        capture_bytes=capture_bytes,
    )
    if runs < 1:
        raise UsageError(f"runs is {runs}; at least two are needed for anything to be compared")
    with _trace(trace) as path:
        if isinstance(target, (str, os.PathLike)):
            if inputs is not None or grad:
                raise UsageError("a target file makes its inputs itself; leave out inputs and grad")
            return auditing.audit(resolve(os.fspath(target)), options, path, progress)
        loaded = _loaded(target, inputs, grad)
        return auditing.audit(loaded.spec, options, path, progress, loaded)


def _conditions(asked: Sequence[str] | None, is_file: bool) -> Sequence[str]:
    possible = CONDITIONS if is_file else (IN_PROCESS, HOOKS_OFF)
    if asked is None:
        return possible
    asked = [asked] if isinstance(asked, str) else list(asked)
    for name in asked:
        if name not in CONDITIONS:
            raise UsageError(f"there is no condition {name!r}; choose of {', '.join(CONDITIONS)}")
        if name not in possible:
            raise UsageError(f"a fresh process cannot build a callable; audit a target file for {name!r}")
    return asked


@contextlib.contextmanager
def _trace(path: str | os.PathLike[str] | None) -> Iterator[Path]:
    if path is not None:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="detaudit-") as folder:
        yield Path(folder, "audit.detaudit")


def _loaded(target: Callable[..., Any], inputs: Any, grad: bool) -> LoadedTarget:
    if not callable(target):
        raise UsageError(f"cannot audit a {type(target).__name__}; give an nn.Module, a callable or a path")
    name = _name(target)
    named = inputs.kwargs if isinstance(inputs, _Arguments) else inputs if isinstance(inputs, dict) else {}
    model = _as_module(target, _referred(target) | named) if inspect.isfunction(target) else target
    build = _Once(model, name)
    make_inputs = inputs if inspect.isroutine(inputs) else lambda: inputs
    home = sys.modules.get(getattr(target, "__module__", None) or "") or types.ModuleType("target")
    return LoadedTarget(TargetSpec(Path(name), "build_model"), home, build, make_inputs, _call, grad)


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    match inputs:
        case None:
            return model()
        case dict():
            return model(**inputs)
        case tuple():
            return model(*inputs)
        case _Arguments():
            return model(*inputs.args, **inputs.kwargs)
        case torch.Tensor():
            return model(inputs)
    raise TargetInvalid(
        f"inputs are a {type(inputs).__name__}; give a tensor, a tuple of positional arguments or a dict of "
        "keyword arguments"
    )


class _Arguments:
    """Positional and keyword arguments of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


def arguments(*args: Any, **kwargs: Any) -> Any:
    """``inputs`` of `audit` for a call with both positional and keyword arguments."""
    return _Arguments(args, kwargs)


class _Once:
    """The factory of a model that exists already, and so cannot be built again."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self._built = False

    def __call__(self) -> Any:
        if self._built:
            raise TargetInvalid(
                f"{self._name} changes parameters, so that no two runs begin alike; build the model inside "
                "the function, or audit a target file with build_model()"
            )
        self._built = True
        return self._model


def _name(target: Callable[..., Any]) -> str:
    owner = target.func if isinstance(target, functools.partial) else target
    name: str = getattr(owner, "__qualname__", None) or type(owner).__name__
    return name.rpartition("<locals>.")[2]


def _as_module(function: types.FunctionType, modules: Mapping[str, object]) -> nn.Module:
    """A module that is the function, so that a difference born in it has a place; ``modules`` are inside."""

    def forward(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    module: nn.Module = type(function.__name__.strip("<>"), (nn.Module,), {"forward": forward})()
    for name, value in modules.items():
        if isinstance(value, nn.Module):
            module.add_module(name, value)
    return module


def _referred(function: types.FunctionType) -> dict[str, Any]:
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a variable of the closure has no value yet
        return {}
    return {**found.globals, **found.nonlocals}
