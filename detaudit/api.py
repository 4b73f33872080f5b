"""The Python interface: audit a module, a function or a target file from a program of one's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from detaudit import auditing
from detaudit.core.errors import TargetInvalid, UsageError
from detaudit.core.options import DEFAULT_CAPTURE_BYTES, DEFAULT_KERNEL_RUNS, DEFAULT_RUNS, Options
from detaudit.core.recording import HOOKS_OFF, IN_PROCESS
from detaudit.core.records import Report
from detaudit.hooks.names import held_modules
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
    wanted = _conditions(conditions, is_file=not callable(target))
    options = Options(
        runs=_whole("runs", runs, 1),
        only=_strings("only", only),
        exclude=_strings("exclude", exclude),
        history=HISTORY in wanted,
        observer=HOOKS_OFF in wanted,
        confirm=_flag("confirm", confirm),
        kernel_runs=_whole("kernel_runs", kernel_runs, 1),
        capture_bytes=_whole("capture_bytes", capture_bytes, 0),
    )
    _check_progress(progress)
    with _trace(trace) as path:
        if isinstance(target, (str, os.PathLike)):
            if inputs is not None or grad:
                raise UsageError("a target file makes its inputs itself; leave out inputs and grad")
            return auditing.audit(resolve(os.fspath(target)), options, path, progress)
        loaded = _loaded(target, inputs, _flag("grad", grad))
        return auditing.audit(loaded.spec, options, path, progress, loaded)


def _conditions(asked: Sequence[str] | None, is_file: bool) -> Sequence[str]:
    possible = CONDITIONS if is_file else (IN_PROCESS, HOOKS_OFF)
    if asked is None:
        return possible
    for name in (asked := _strings("conditions", asked)):
        if name not in CONDITIONS:
            raise UsageError(f"there is no condition {name!r}; choose of {', '.join(CONDITIONS)}")
        if name not in possible:
            raise UsageError(f"a fresh process cannot build a callable; audit a target file for {name!r}")
    return asked


def _whole(name: str, value: object, least: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(f"{name} is {value!r}; give a whole number, at least {least}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; give True or False")
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    """A single string stands for itself."""
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if strings is None or not all(isinstance(item, str) for item in strings):
        raise UsageError(f"{name} is {value!r}; give strings")
    return strings


def _check_progress(progress: object) -> None:
    methods = ("begin", "advance", "describe")
    if progress is not None and not all(callable(getattr(progress, method, None)) for method in methods):
        raise UsageError(f"progress is {progress!r}; give an object with the methods {', '.join(methods)}")


def as_path(name: str, value: object) -> Path:
    """The path given as argument ``name``. Raises UsageError where it is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} is {value!r}; give a path")
    return Path(value)


@contextlib.contextmanager
def _trace(path: str | os.PathLike[str] | None) -> Iterator[Path]:
    if path is not None:
        yield as_path("trace", path)
        return
    with tempfile.TemporaryDirectory(prefix="detaudit-") as folder:
        yield Path(folder, "audit.detaudit")


def _loaded(target: Callable[..., Any], inputs: Any, grad: bool) -> LoadedTarget:
    if not callable(target):
        raise UsageError(f"cannot audit a {type(target).__name__}; give an nn.Module, a callable or a path")
    name = _name(target)
    named = inputs.kwargs if isinstance(inputs, _Arguments) else inputs if isinstance(inputs, dict) else {}
    build = _Once(_as_module(target, named), name)
    make_inputs = inputs if inspect.isroutine(inputs) else lambda: inputs
    home = _home(target, name)
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


def _home(target: Callable[..., Any], name: str) -> types.ModuleType:
    """The target's Python module with the target in it, so that all generators it leads to are found."""
    known = sys.modules.get(getattr(target, "__module__", None) or "")
    home = types.ModuleType("target")
    vars(home).update({**(vars(known) if known else {}), name: target})
    return home


def _as_module(target: Callable[..., Any], modules: Mapping[str, object]) -> Callable[..., Any]:
    """A module that is the callable, so that a difference born in it has a place; ``modules`` are inside."""
    if isinstance(target, functools.partial):
        inside = _as_module(target.func, {**modules, **target.keywords})
        return functools.partial(inside, *target.args, **target.keywords)
    owner = getattr(target, "__self__", target)
    if isinstance(owner, nn.Module) and target in (owner, owner.forward, owner.__call__):
        return _Forward(owner) if target == owner.forward else owner

    def forward(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    name = _name(target).rpartition(".")[2].strip("<>")
    module: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    held = {**_held(target), **modules}
    # Not add_module: it refuses paths such as ``stages.unet`` and names such as ``half``.
    module._modules.update({key: value for key, value in held.items() if isinstance(value, nn.Module)})
    return module


class _Forward:
    """``forward`` of a module, looked up at each call: a method bound before is not seen to be called."""

    def __init__(self, owner: nn.Module) -> None:
        self.__self__ = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__self__.forward(*args, **kwargs)


def _held(target: Callable[..., Any]) -> dict[str, Any]:
    """What a function refers to; the modules that another callable holds or belongs to, by their paths."""
    if inspect.isfunction(target):
        wrapped = getattr(target, "__wrapped__", None)
        return {**(_held(wrapped) if callable(wrapped) else {}), **_referred(target)}
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        return {**dict(owner.named_children()), "self": owner}
    return dict(held_modules(target))


def _referred(function: types.FunctionType) -> dict[str, Any]:
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a variable of the closure has no value yet
        return {}
    return {**found.globals, **found.nonlocals}
