"""Digests of a model's parameters and gradients, as run-level records.

A parameter that differs between the first and the last run is the finding ``stateful``; a gradient that a run
leaves is a site like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from detaudit.core.digest import Digester, NotObservable, Pending, parts
from detaudit.core.recording import Record


@dataclass(frozen=True, slots=True)
class PendingSites:
    """Sites on their way to a record: readable once the digester has finished the run.

    ``unobserved`` holds (site, reason) of what could not be digested.
    """

    sites: tuple[tuple[str, Pending], ...]
    unobserved: tuple[tuple[str, str], ...] = ()

    def resolve(self) -> tuple[Record, tuple[tuple[str, str], ...]]:
        """The record, sorted by site, and what could not be observed."""
        return tuple(sorted((site, pending.value) for site, pending in self.sites)), self.unobserved


def parameter_record(digester: Digester, *models: nn.Module) -> PendingSites:
    """Digest every parameter; sites are ``named_parameters()`` paths, a shared one by its first path."""
    return _submit(digester, _parameters(models))


def gradient_record(digester: Digester, *models: nn.Module) -> PendingSites:
    """Digest every ``.grad`` that is not None; sites are ``grad.<parameter path>``."""
    gradients = ((f"grad.{path}", p.grad) for path, p in _parameters(models) if p.grad is not None)
    return _submit(digester, gradients)


def _parameters(models: tuple[nn.Module, ...]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for index, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"{type(model).__name__}#{index}"
        for path, parameter in model.named_parameters(prefix=prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, parameter


def _submit(digester: Digester, tensors: Iterable[tuple[str, Tensor]]) -> PendingSites:
    sites: list[tuple[str, Pending]] = []
    unobserved: list[tuple[str, str]] = []
    for site, tensor in tensors:
        try:
            sites.extend((site + suffix, digester.submit(part)) for suffix, part in parts(tensor))
        except NotObservable as error:
            unobserved.append((site, error.reason))
    return PendingSites(tuple(sites), tuple(unobserved))
