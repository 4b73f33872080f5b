"""Random generators: read before the first run, put back before every other one.

Known without being told: Python's ``random``, NumPy's legacy generator (where NumPy is imported already),
torch's CPU generator, and torch's CUDA generators (where CUDA is initialised already; their state lives on
the host, so reading it does not synchronise). Private ones are found in the attributes of the model and of
whatever else is handed in; those that no attribute leads to (module globals, tables of requests) are found by
``survey``, which watches one run. NumPy is never imported here and CUDA never initialised.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from detaudit.core.digest import unseen
from detaudit.hooks.generator_sources import (
    Saved,
    TorchGenerator,
    default_sources,
    find,
    is_default,
)
from detaudit.hooks.generator_survey import Survey, survey

__all__ = ["GeneratorStates", "Survey", "adopt", "capture", "load", "restore", "survey"]

_DONE = "put back"


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """What ``capture`` read: one entry per generator, and what is known but cannot be put back.

    Args:
        saved: generators with the state that ``restore`` writes.
        lost: (name, reason) of generators that cannot be put back: the finding ``rng-consumed``.
    """

    saved: tuple[Saved, ...]
    lost: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.source.name for entry in self.saved)

    def consumed(self) -> tuple[str, ...]:
        """Names of the generators whose state is no longer the saved one: a run drew from them."""
        return tuple(e.source.name for e in self.saved if not _same(e.source.read(), e.state))

    def describe(self) -> dict[str, str]:
        """Name to ``put back`` or the reason why not; JSON-compatible, for the report's ``restored``."""
        return {
            **dict.fromkeys(self.names, _DONE),
            **{name: f"not put back: {why}" for name, why in self.lost},
        }

    def with_survey(self, survey: Survey) -> GeneratorStates:
        """These states and, as they were on first use, those of the generators the survey met."""
        known = {entry.source.identity for entry in self.saved}
        new = tuple(entry for entry in survey.found if entry.source.identity not in known)
        lost = dict([*self.lost, *survey.lost])
        return replace(self, saved=self.saved + new, lost=tuple(lost.items()))

    def dump(self) -> bytes:
        """The process-wide generators' states, for ``load`` in a fresh process; private ones left out."""
        return pickle.dumps(
            {e.source.name: _portable(e.state) for e in self.saved if is_default(e.source.name)}
        )


def load(data: bytes) -> tuple[tuple[str, str], ...]:
    """Write states that another process of the same audit dumped; it is a pickle, so from no other source.

    Returns (name, reason) of those that could not be written.
    """
    states: dict[str, object] = pickle.loads(data)
    sources = {source.name: source for source in default_sources()}
    saved = tuple(Saved(sources[n], _native(s)) for n, s in states.items() if n in sources)
    absent = tuple((n, "not there in this process") for n in states if n not in sources)
    return absent + restore(GeneratorStates(saved))


def capture(*roots: object, names: Sequence[str] = ()) -> GeneratorStates:
    """Read the process-wide generators and the private ones reachable from ``roots``.

    Roots are models, functions, dicts: see ``find``. ``names`` are the roots' names in reports; a root
    without one is called by its class.
    """
    saved: list[Saved] = []
    lost: list[tuple[str, str]] = []
    seen: set[tuple[str, int]] = set()
    for source in [*default_sources(), *find(*roots, names=names)]:
        if source.identity in seen:
            continue
        seen.add(source.identity)
        try:
            saved.append(Saved(source, source.read()))
        except Exception as error:  # a SystemRandom, a device without readable state
            lost.append((source.name, f"its state cannot be read ({type(error).__name__}: {error})"))
    return GeneratorStates(tuple(saved), tuple(lost))


def restore(states: GeneratorStates) -> tuple[tuple[str, str], ...]:
    """Write every saved state, and read it again; (name, reason) of each that did not take it.

    Generators that came to life after ``capture`` (CUDA initialised by the first run, NumPy imported by it)
    are named too: their state before that run is not known, and ``adopt`` puts them on the list from then on.
    """
    failed: list[tuple[str, str]] = []
    for entry in states.saved:
        try:
            entry.source.write(entry.state)
            if not _same(entry.source.read(), entry.state):
                failed.append((entry.source.name, "it did not take its state back"))
        except Exception as error:
            failed.append((entry.source.name, f"{type(error).__name__}: {error}"))
    known = {entry.source.identity for entry in states.saved}
    late = (source for source in default_sources() if source.identity not in known)
    failed.extend((source.name, "it came to life during a run") for source in late)
    return (*states.lost, *failed)


def adopt(states: GeneratorStates) -> GeneratorStates:
    """Add the process-wide generators that came to life after ``capture``.

    A CUDA generator that the first run brought to life starts that run at its own seed, offset 0, so this
    is the state it gets. NumPy's has no seed to ask for: it is adopted as it stands.
    """
    known = {entry.source.identity for entry in states.saved}
    late = [source for source in default_sources() if source.identity not in known]
    for source in late:
        if isinstance(source, TorchGenerator):
            source.generator.manual_seed(source.generator.initial_seed())
    return replace(states, saved=states.saved + tuple(Saved(source, source.read()) for source in late))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        with unseen():
            return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if hasattr(a, "tobytes"):
        return hasattr(b, "tobytes") and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _portable(state: object) -> object:
    return bytes(state.tolist()) if isinstance(state, torch.Tensor) else state


def _native(state: object) -> object:
    return torch.tensor(list(state), dtype=torch.uint8, device="cpu") if isinstance(state, bytes) else state
