"""The target: the user's file, what it builds and what it is fed.

A file is looked into by its syntax tree first. It is imported only where that leaves doubt, so that a script
is never executed by looking at it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from detaudit.core.errors import DetauditError, TargetInvalid, TargetNotFound, TargetRaised

DEFAULT_FACTORY = "build_model"
INPUTS = "make_inputs"
RUN = "run_model"
GRADIENTS = "enable_grad"
"""A target that wants gradients says ``enable_grad = True`` (or uses ``torch.enable_grad()`` itself)."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which file, in which mode. ``factory`` is ``None`` for a script."""

    path: Path
    factory: str | None
    argv: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        return self.factory is None

    @property
    def label(self) -> str:
        suffix = "" if self.factory in (None, DEFAULT_FACTORY) else f":{self.factory}"
        return f"{self.path.name}{suffix}"


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """An imported target. ``run`` gives the final output of one execution."""

    spec: TargetSpec
    module: ModuleType
    build: Callable[[], Any]
    make_inputs: Callable[[], Any]
    run: Callable[[Any, Any], Any]
    wants_grad: bool


def resolve(target: str, *, script: bool = False, argv: Sequence[str] = ()) -> TargetSpec:
    """Find out what ``target`` (``FILE`` or ``FILE:FACTORY``) is.

    Raises:
        TargetNotFound: no such file, or no such factory in it.
        TargetInvalid: the file does not parse, or has one of the two functions without the other.
    """
    path, named = _split(target)
    if script:
        if named:
            raise TargetInvalid(
                f"a script has no factory: say '{path}' without ':{named}', or leave --script out"
            )
        return TargetSpec(path, None, tuple(argv))
    names, certain = _top_level_names(path)
    if not certain and not {named or DEFAULT_FACTORY, INPUTS} <= names:
        spec = TargetSpec(path, named or DEFAULT_FACTORY, tuple(argv))
        names = set(vars(_import(spec)))
    has_factory, has_inputs = (named or DEFAULT_FACTORY) in names, INPUTS in names
    if named and not has_factory:
        raise TargetNotFound(
            f"{path} defines no '{named}'; name a function of the file that returns the model"
        )
    if not has_factory and not has_inputs:
        return TargetSpec(path, None, tuple(argv))
    if not has_inputs:
        raise TargetInvalid(
            f"{path} has {named or DEFAULT_FACTORY}() but no {INPUTS}(); add one that returns a "
            "tensor, a tuple of positional arguments or a dict of keyword arguments, "
            "or run the file with --script"
        )
    if not has_factory:
        raise TargetInvalid(
            f"{path} has {INPUTS}() but no {DEFAULT_FACTORY}(); add it, name another factory as "
            f"{path.name}:NAME, or run the file with --script"
        )
    return TargetSpec(path, named or DEFAULT_FACTORY, tuple(argv))


def load(spec: TargetSpec) -> LoadedTarget:
    """Import a function-mode target.

    Raises:
        TargetRaised: the file raised while it was imported.
        TargetInvalid: a factory is not callable.
    """
    assert spec.factory is not None
    module = _import(spec)
    build, make_inputs = getattr(module, spec.factory, None), getattr(module, INPUTS, None)
    for name, function in ((spec.factory, build), (INPUTS, make_inputs)):
        if not callable(function):
            raise TargetInvalid(f"{spec.path}: '{name}' is not a function; define it with 'def {name}():'")
    assert callable(build)
    assert callable(make_inputs)
    run = getattr(module, RUN, None)
    if run is not None and not callable(run):
        raise TargetInvalid(
            f"{spec.path}: '{RUN}' is not a function; define it as 'def {RUN}(model, inputs):'"
        )
    return LoadedTarget(
        spec=spec,
        module=module,
        build=build,
        make_inputs=make_inputs,
        run=run or _plain_call,
        wants_grad=bool(getattr(module, GRADIENTS, False)),
    )


def check_inputs(target: LoadedTarget, inputs: Any) -> None:
    """A target without ``run_model`` must give inputs that can be passed to a call."""
    import torch

    if target.run is _plain_call and not isinstance(inputs, (torch.Tensor, tuple, dict)):
        raise TargetInvalid(
            f"{target.spec.path}: {INPUTS}() returned {type(inputs).__name__}; return a tensor, "
            f"a tuple of positional arguments or a dict of keyword arguments, or define {RUN}(model, inputs)"
        )


def check_model(target: LoadedTarget, model: Any) -> None:
    if not callable(model) and target.run is _plain_call:
        raise TargetInvalid(
            f"{target.spec.path}: {target.spec.factory}() returned {type(model).__name__}, which cannot "
            f"be called; return an nn.Module or a callable, or define {RUN}(model, inputs)"
        )


@contextmanager
def target_errors(spec: TargetSpec, doing: str) -> Iterator[None]:
    """Turn what the target's own code raises into ``TargetRaised``, with the frames of the user's files.

    ``KeyboardInterrupt`` and detaudit's own errors pass through; a script's ``sys.exit(0)`` is no error, but
    a function that ends so returned nothing.
    """
    try:
        yield
    except (KeyboardInterrupt, DetauditError):
        raise
    except SystemExit as error:
        if not spec.is_script or error.code not in (None, 0):
            raise TargetRaised(
                f"{spec.path} ended with sys.exit({error.code!r}) while {doing}", ""
            ) from error
    except BaseException as error:
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        raise TargetRaised(f"{spec.path} raised while {doing}: {summary}", _user_frames(error)) from error


@contextmanager
def import_context(spec: TargetSpec) -> Iterator[None]:
    """``sys.path`` and ``sys.argv`` as ``python FILE ARGS`` would set them."""
    path, argv = list(sys.path), list(sys.argv)
    sys.path.insert(0, str(spec.path.parent.resolve()))
    sys.argv[:] = [str(spec.path), *spec.argv]
    try:
        yield
    finally:
        sys.argv[:] = argv
        sys.path[:] = path


def _split(target: str) -> tuple[Path, str | None]:
    path = Path(target)
    named: str | None = None
    if not path.exists() and ":" in target:
        head, _, tail = target.rpartition(":")
        path, named = Path(head), tail
        if not tail.isidentifier():
            raise TargetNotFound(f"'{target}' names no function behind the colon; write FILE.py:NAME")
    if not path.exists():
        raise TargetNotFound(
            f"no such file: {path}; give the Python file that holds build_model() and make_inputs()"
        )
    if path.is_dir():
        raise TargetNotFound(f"{path} is a folder; give a Python file in it")
    return path, named


def _top_level_names(path: Path) -> tuple[set[str], bool]:
    """Names the file binds at its top level, and whether that is all of them."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise TargetInvalid(
            f"{path}, line {error.lineno}: {error.msg}; the file is not valid Python"
        ) from error
    except (ValueError, OSError) as error:
        raise TargetInvalid(f"{path} cannot be read as Python: {error}") from error
    names: set[str] = set()
    certain = True
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            certain = certain and "*" not in bound
            names |= bound
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Call) and _may_bind(node):
            certain = False
            pending.extend(ast.iter_child_nodes(node))
        elif not isinstance(node, ast.Lambda) and not _is_main_guard(node):
            pending.extend(ast.iter_child_nodes(node))
    return names, certain


def _may_bind(call: ast.Call) -> bool:
    """Whether the call may bind names of the file; ``vars(x)`` with an argument is about something else."""
    name = getattr(call.func, "id", "")
    return name in ("globals", "exec") or (name in ("vars", "locals") and not call.args)


def _is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )


def _import(spec: TargetSpec) -> ModuleType:
    """Import the file under the name Python would give it, once per process."""
    path = spec.path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():
        root, name = root.parent, f"{root.name}.{name}"
    for known in (sys.modules.get(name), sys.modules.get(_private_name(path))):
        if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == path:
            return known
    with import_context(spec), target_errors(spec, "it was imported"):
        sys.path.insert(0, str(root))
        if "." in name:
            module = importlib.import_module(name)
        else:
            module = _import_from_file(_private_name(path) if name in sys.modules else name, path)
    return module


def _private_name(path: Path) -> str:
    return f"_detaudit_target_{path.stem}"


def _import_from_file(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _plain_call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def _user_frames(error: BaseException) -> str:
    """The traceback without the frames of detaudit, torch's call machinery and the import system."""
    ours = str(Path(__file__).parent)
    hooks = str(Path(__file__).parent.parent / "hooks")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, hooks, "<frozen"))
        and not frame.filename.endswith(("torch/nn/modules/module.py", "/runpy.py", "importlib/__init__.py"))
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)
