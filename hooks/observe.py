"""Digests of everything in a value: submitted at once, readable when the digester has finished."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import Digester, NotObservable, Pending, is_ordinary, parts, unseen
from detaudit.core.recording import Record
from detaudit.hooks.tree import Opaque, flatten

_CONSTANTS = (bool, int, str, type(None))
_STATELESS = (
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    weakref.ref,
    nn.Module,
    torch.cuda.Stream,
)
"""Neither data nor holders of data a call would read: they are passed over without a word."""


_MAX_CONSTANTS = 4096


@dataclass(slots=True, eq=False)
class PendingRecord:
    """Digests on their way: (site, pending) and (site, reason) of what could not be observed."""

    entries: list[tuple[str, Pending]] = field(default_factory=list)
    unobserved: list[tuple[str, str]] = field(default_factory=list)
    _resolved: tuple[Record, tuple[tuple[str, str], ...]] | None = None

    def resolve(self) -> tuple[Record, tuple[tuple[str, str], ...]]:
        """The record, sorted by site, and what is missing from it; only after the digester's ``finish()``."""
        if self._resolved is None:
            values = {site: pending.value for site, pending in self.entries}
            self._resolved = tuple(sorted(values.items(), key=_site)), tuple(self.unobserved)
        return self._resolved


def _site(entry: tuple[str, object]) -> str:
    return entry[0]


def observe(value: object, site: str, digester: Digester) -> PendingRecord:
    """Submit every tensor and host scalar in ``value``; sites begin with ``site`` (see ``tree.flatten``)."""
    return observe_leaves(flatten(value, site), digester)


def observe_leaves(leaves: Iterable[tuple[str, object]], digester: Digester) -> PendingRecord:
    """Submit (site, tensor or host scalar) pairs."""
    observer = Observer(digester)
    record = observer.observe(leaves)
    observer.flush()
    return record


class Observer:
    """Submits leaves to a digester: the tensors of one moment together, each once however often it is met."""

    def __init__(self, digester: Digester) -> None:
        self._digester = digester
        self._constants: dict[tuple[type, object], Pending] = {}
        self._states: dict[torch.Generator, tuple[bytes, Pending]] = {}
        self._generators = PendingRecord()
        self._tensors: list[tuple[PendingRecord, str, Tensor]] = []

    def trim(self) -> None:
        """Let go of digests of host scalars, where many have come together."""
        if len(self._constants) > _MAX_CONSTANTS:
            self._constants.clear()

    def observe(self, leaves: Iterable[tuple[str, object]]) -> PendingRecord:
        """Take the leaves; tensors are digested when ``flush`` is called, before anything can change them."""
        record = PendingRecord()
        for site, leaf in leaves:
            if type(leaf) is Tensor and is_ordinary(leaf):
                self._tensors.append((record, site, leaf))
            else:
                self._take(site, leaf, record)
        return record

    def generators(self) -> PendingRecord:
        """States of torch's generators now; the same object as last time where none has moved."""
        found = generator_states()
        try:
            entries = [(site, self._generator(generator)) for site, generator in found]
        except Exception:  # one of them cannot be read, and ``observe`` says why
            return self.observe(found)
        if entries != self._generators.entries:
            self._generators = PendingRecord(entries)
        return self._generators

    def flush(self) -> None:
        """Submit the tensors taken since the last time."""
        if not self._tensors:
            return
        taken, self._tensors = self._tensors, []
        distinct = {id(tensor): tensor for _, _, tensor in taken}
        try:
            pendings = dict(zip(distinct, self._digester.submit_all(list(distinct.values())), strict=True))
        except Exception:
            pendings = {}  # one of them refused; the others can still be had
        for record, site, tensor in taken:
            pending = pendings.get(id(tensor))
            if pending is not None:
                record.entries.append((site, pending))
            else:
                with _reasons(record, site):
                    record.entries.append((site, self._digester.submit(tensor)))

    def _take(self, site: str, leaf: object, record: PendingRecord) -> None:
        kind = type(leaf)
        if kind in _CONSTANTS:
            record.entries.append((site, self._constant(kind, leaf)))
        elif isinstance(leaf, Tensor):
            self._take_tensor(site, leaf, record)
        elif isinstance(leaf, Opaque):
            record.unobserved.append((site, leaf.reason))
        elif not isinstance(leaf, _STATELESS):
            with _reasons(record, site):
                record.entries.append((site, self._other(leaf)))

    def _take_tensor(self, site: str, tensor: Tensor, record: PendingRecord) -> None:
        if is_ordinary(tensor):
            self._tensors.append((record, site, tensor))
        else:
            with _reasons(record, site):
                self._tensors.extend((record, site + suffix, part) for suffix, part in parts(tensor))

    def _constant(self, kind: type, value: object) -> Pending:
        pending = self._constants.get((kind, value))
        if pending is None:
            pending = self._constants[kind, value] = self._digester.submit_scalar(value)
        return pending

    def _other(self, leaf: object) -> Pending:
        if isinstance(leaf, torch.Generator):
            return self._generator(leaf)
        if _is_array(leaf):
            return self._digester.submit(_from_array(leaf))
        return self._digester.submit_scalar(leaf)

    def _generator(self, generator: torch.Generator) -> Pending:
        """The state, digested only where it has moved since it was last asked for: it hardly ever has."""
        state = generator.get_state()
        held = ctypes.string_at(state.data_ptr(), state.numel())  # compares in a tenth of torch.equal's time
        known = self._states.get(generator)
        if known is None or known[0] != held:
            known = self._states[generator] = (held, self._digester.submit(state))
        return known[1]


@contextlib.contextmanager
def _reasons(record: PendingRecord, site: str) -> Iterator[None]:
    """What is raised inside becomes the reason why the site was not observed."""
    try:
        yield
    except NotObservable as error:
        record.unobserved.append((site, error.reason))
    except Exception as error:  # a tensor subclass or a device may refuse in any way it likes
        record.unobserved.append((site, f"{type(error).__name__}: {error}".splitlines()[0]))


def _is_array(leaf: object) -> bool:
    return type(leaf).__module__ == "numpy" and type(leaf).__name__ == "ndarray"


def _from_array(array: Any) -> Tensor:
    with unseen():
        try:
            return torch.from_numpy(array if array.flags.writeable else array.copy())
        except (TypeError, ValueError) as error:
            raise NotObservable(f"a NumPy array that torch cannot hold ({error})") from error


def generator_states() -> list[tuple[str, torch.Generator]]:
    """(site, generator) of torch's default generators: ``rng.cpu``, and ``rng.cuda:N`` of devices in use.

    A CUDA generator's state lies on the host, so reading it does not synchronise. While the current stream
    captures a graph it cannot be read.
    """
    found: list[tuple[str, torch.Generator]] = [("rng.cpu", torch.default_generator)]
    cuda: Any = torch.cuda  # without annotations
    if cuda.is_initialized():
        for index, generator in enumerate(cuda.default_generators):
            if _has_context(index):
                found.append((f"rng.cuda:{index}", generator))
    return found


_has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext", lambda device: True)
