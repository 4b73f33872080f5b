"""Kinds of random generators: which there are, and how the state of each is read and written."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from detaudit.core.digest import unseen
from detaudit.hooks.reach import reachable


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
    """Private generators that ``roots`` lead to through attributes, containers, closures and partials."""
    labels = [*names, *(type(root).__name__ for root in roots[len(names) :])]
    for label, root in zip(labels, roots, strict=True):
        for path, value in reachable(label, root):
            source = _as_source(path, value)
            if source is not None:
                yield source


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
