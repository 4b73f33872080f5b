"""Watches one run for random generators that no attribute leads to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from detaudit.hooks.dispatch import Watcher
from detaudit.hooks.generator_sources import Saved, TorchGenerator, default_sources

SURVEY_LIMIT = 256
"""Private generators a survey keeps; a serving loop may make one per request."""

_PUT_BACK = frozenset({"cpu", "cuda", "meta"})


@dataclass(slots=True)
class Survey:
    """What one watched run showed. Read it after the block.

    Args:
        found: each torch generator an operator was handed, with its state just before it was first used.
        lost: (name, reason) of randomness nobody can put back: operators that draw on a device whose
            generator is
            not among those of ``capture``, and generators whose state cannot be read.
        drew: operators that drew random numbers, with how often.
    """

    found: list[Saved] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    drew: dict[str, int] = field(default_factory=dict)


@contextmanager
def survey() -> Iterator[Survey]:
    """Watch one run for generators: ``with survey() as seen: model(x)``. Looks at this thread only.

    It reads arguments and forwards every operator unchanged; nothing is drawn.
    """
    seen = Survey()
    with _GeneratorWatcher(seen):
        yield seen


class _GeneratorWatcher(Watcher):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Survey) -> None:
        super().__init__()
        self.seen = seen
        self._identities: set[tuple[str, int]] = {source.identity for source in default_sources()}

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generators = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
        for generator in generators:
            self._meet(str(func), generator)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.seen.drew[str(func)] = self.seen.drew.get(str(func), 0) + 1
            if not generators:
                self._check_device(str(func), args, kwargs)
        return func(*args, **kwargs)

    def _meet(self, operator: str, generator: torch.Generator) -> None:
        name = f"generator {len(self.seen.found)} ({generator.device}, first used by {operator})"
        source = TorchGenerator(name, generator)
        if source.identity in self._identities:
            return
        if len(self.seen.found) >= SURVEY_LIMIT:
            self._lose("private generators", f"the run uses more than {SURVEY_LIMIT} of them")
            return
        self._identities.add(source.identity)
        try:
            self.seen.found.append(Saved(source, source.read()))
        except Exception as error:
            self._lose(name, f"its state cannot be read ({type(error).__name__}: {error})")

    def _check_device(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        kind = "cpu" if device is None else torch.device(device).type
        if kind not in _PUT_BACK:
            self._lose(f"{kind} generator", f"{operator} draws on a device whose generator is not known here")

    def _lose(self, name: str, reason: str) -> None:
        if (name, reason) not in self.seen.lost:
            self.seen.lost.append((name, reason))
