"""Kinds of random generators: which there are, and how the state of each is read and written."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from detaudit.core.digest import unseen

_NODE_LIMIT = 200_000


class Source(Protocol):
    """One generator: its name in reports, and how its state is read and written."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> tuple[str, int]: ...

    def read(self) -> object: ...

    def write(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class PythonRandom:
    """``random`` itself or a ``random.Random``."""

    name: str
    generator: Any

    @property
    def identity(self) -> tuple[str, int]:
        return "python", id(self.generator)

    def read(self) -> object:
        return self.generator.getstate()

    def write(self, state: Any) -> None:
        self.generator.setstate(state)


@dataclass(frozen=True, slots=True)
class NumpyGenerator:
    """A NumPy bit generator: the state behind a ``Generator``, a ``RandomState`` or ``numpy.random`` itself.

    ``legacy`` is the ``RandomState`` around it, if any: that one also keeps a second normal deviate.
    """

    name: str
    bits: Any
    legacy: Any = None

    @property
    def identity(self) -> tuple[str, int]:
        return "numpy", id(self.bits)

    def read(self) -> object:
        return self.bits.state if self.legacy is None else self.legacy.get_state(legacy=False)

    def write(self, state: Any) -> None:
        if self.legacy is None:
            self.bits.state = state
        else:
            self.legacy.set_state(state)


@dataclass(frozen=True, slots=True)
class TorchGenerator:
    """A ``torch.Generator`` of any device. The Python object may be one of several around one generator."""

    name: str
    generator: torch.Generator

    @property
    def identity(self) -> tuple[str, int]:
        return "torch", getattr(self.generator, "_cdata", id(self.generator))

    def read(self) -> object:
        with unseen():
            return self.generator.get_state()

    def write(self, state: Any) -> None:
        with unseen():
            self.generator.set_state(state)


@dataclass(frozen=True, slots=True)
class Saved:
    """A generator and the state to put back."""

    source: Source
    state: object


def find(*roots: object, names: Sequence[str] = ()) -> Iterator[Source]:
    """Private generators reachable from ``roots`` through attributes, containers, closures and partials.

    Classes, Python modules and tensors are not entered. Each object is visited once, so a generator has the
    first path that leads to it.
    """
    labels = [*names, *(type(root).__name__ for root in roots[len(names) :])]
    pending: list[tuple[str, object]] = list(zip(labels, roots, strict=True))[::-1]
    seen: set[int] = set()
    while pending and len(seen) < _NODE_LIMIT:
        path, value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        source = _as_source(path, value)
        if source is not None:
            yield source
        else:
            pending.extend(list(_children(path, value))[::-1])


_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.Tensor,
    torch.dtype,
)


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    match value:
        case torch.nn.Module():
            for key, item in vars(value).items():
                if key == "_modules":
                    yield from ((f"{path}.{name}", child) for name, child in value._modules.items())
                elif key not in ("_parameters", "_buffers"):
                    yield f"{path}.{key}", item
        case dict():
            items = [(key, item) for key, item in value.items() if not isinstance(item, _LEAVES)]
            yield from ((f"{path}[{key!r}]", item) for key, item in items)
        case list() | tuple() | set() | frozenset():
            items = [(i, item) for i, item in enumerate(value) if not isinstance(item, _LEAVES)]
            yield from ((f"{path}[{i}]", item) for i, item in items)
        case functools.partial():
            yield from (
                (f"{path}.func", value.func),
                (f"{path}.args", value.args),
                (f"{path}.keywords", value.keywords),
            )
        case types.MethodType():
            yield from ((f"{path}.__self__", value.__self__), (f"{path}.__func__", value.__func__))
        case types.FunctionType():
            yield f"{path}.__defaults__", value.__defaults__
            yield f"{path}.__kwdefaults__", value.__kwdefaults__
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            yield from ((f"{path}.{name}", _cell(cell)) for name, cell in cells)
        case _ if not isinstance(value, _LEAVES):
            attributes = [(k, v) for k, v in _own(value).items() if not isinstance(v, _LEAVES)]
            yield from ((f"{path}.{key}", item) for key, item in attributes)
            for cls in type(value).__mro__:
                slots = vars(cls).get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    yield f"{path}.{name}", getattr(value, name, None)


def _own(value: object) -> dict[str, object]:
    try:
        # Not getattr: a lazy proxy would do whatever it does on attribute access.
        attributes: dict[str, object] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(attributes)


def _cell(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None


def _as_source(path: str, value: object) -> Source | None:
    if isinstance(value, torch.Generator):
        return TorchGenerator(path, value)
    if isinstance(value, random.Random):
        return PythonRandom(path, value)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        return NumpyGenerator(path, getattr(value, "_bit_generator", value), legacy=value)
    if isinstance(value, numpy_random.Generator):
        return NumpyGenerator(path, value.bit_generator)
    if isinstance(value, numpy_random.BitGenerator):
        return NumpyGenerator(path, value)
    return None


def default_sources() -> Iterator[Source]:
    # The hidden instance, so that a reference to it in an attribute is known for what it is.
    yield PythonRandom("python", getattr(random, "_inst", random))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # NumPy loads this part of itself on first use, which would otherwise be in the middle of a run.
        legacy = numpy.random.mtrand._rand
        yield NumpyGenerator("numpy", legacy._bit_generator, legacy=legacy)
    yield TorchGenerator("cpu", torch.default_generator)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            yield TorchGenerator(f"cuda:{index}", generator)


def is_default(name: str) -> bool:
    return name in {"python", "numpy", "cpu"} or (name.startswith("cuda:") and name[5:].isdigit())
