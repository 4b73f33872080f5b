"""Digests of a model's parameters and gradients, as run-level records.

A parameter that differs between the first and the last run is the finding ``stateful``; a gradient that a run
leaves is a site like any other.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from detaudit.core.digest import Digester
from detaudit.hooks.observe import PendingRecord, observe_leaves


def parameter_record(digester: Digester, *models: nn.Module) -> PendingRecord:
    """Digest every parameter; sites are ``named_parameters()`` paths, a shared one by its first path."""
    return observe_leaves(_parameters(models), digester)


def gradient_record(digester: Digester, *models: nn.Module) -> PendingRecord:
    """Digest every ``.grad`` that is not None; sites are ``grad.<parameter path>``."""
    gradients = ((f"grad.{path}", p.grad) for path, p in _parameters(models) if p.grad is not None)
    return observe_leaves(gradients, digester)


def _parameters(models: tuple[nn.Module, ...]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for index, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"{type(model).__name__}#{index}"
        for path, parameter in model.named_parameters(prefix=prefix):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield path, parameter
