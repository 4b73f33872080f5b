"""Models for each situation that leads determinism tools astray. ``racing`` plants a race, or does not."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import HIDDEN, TOKENS, TOP_K, combine_ordered, combine_racing

_ORDER = itertools.count()


def inputs() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


class Combine(nn.Module):
    """Spreads each row over ``TOP_K`` others and sums: [TOKENS, HIDDEN] -> the same."""

    target: Tensor
    weight: Tensor

    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.racing = racing
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("target", torch.randperm(TOKENS * TOP_K, generator=generator) % TOKENS)
        self.register_buffer("weight", torch.randn(TOKENS * TOP_K, 1, generator=generator) / TOP_K)

    def forward(self, x: Tensor) -> Any:
        rows = x.repeat(TOP_K, 1) * self.weight
        return (combine_racing if self.racing else combine_ordered)(rows, self.target, TOKENS)


class Embed(nn.Module):
    """Looks up rows of a table, which the backward pass adds up: [TOKENS, HIDDEN] -> TOP_K times the rows."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(TOKENS, HIDDEN))
        self.register_buffer("index", Combine(True).target)

    def forward(self, x: Tensor) -> Tensor:
        return self.table[self.index] * x.repeat(TOP_K, 1)


class Shared(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.first = Combine(racing)
        self.second = self.first

    def forward(self, x: Tensor) -> Any:
        return self.first(x) + self.second(2 * x)


class Repeated(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return x


class Forwarding(nn.Module):
    """Calls its child as ``child.forward(x)``."""

    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        return self.block.forward(x) * 2


class Scratch(nn.Module):
    """Returns a view of a buffer that is overwritten behind its back."""

    store: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("store", torch.zeros(TOKENS, HIDDEN))

    def forward(self, x: Tensor) -> Any:
        self.store.copy_(x)
        return self.store[:]


class ViewsChangedLater(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.scratch = Scratch()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        view = self.scratch(x)
        y = self.block(x)
        view.add_(y)
        return view.sum(1)


class Shuffled(nn.Module):
    """Returns a dict whose keys come in another order in every run."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = {"a": x + 1, "b": x + 2}
        return dict(reversed(parts.items())) if next(_ORDER) % 2 else parts


class DictOrder(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.shuffled = Shuffled()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = self.shuffled(x)
        return {name: self.block(parts[name]) for name in sorted(parts)}


class Randomized(nn.Module):
    """Dropout and a generator of its own: random, but put back before each run."""

    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.block = Combine(racing)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Any:
        noise = torch.randn(x.shape, generator=self.generator)
        return self.block(self.dropout(x) + noise)


class Cache(nn.Module):
    """Keeps what it was given in this run; emptied by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept.append(x)
        return torch.stack(self.kept).sum(0)


class GrowingCache(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.cache = Cache()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        self.cache.kept.clear()
        for step in range(3):
            y = self.cache(x + step)
        return self.block(y)


class InPlace(nn.Module):
    """Adds into a keyword argument."""

    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.racing = racing
        self.inner = Combine(racing)

    def forward(self, x: Tensor, *, into: Tensor) -> None:
        into.add_(self.inner(x))


class KwargsChanged(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.adder = InPlace(racing)

    def forward(self, x: Tensor) -> Any:
        total = torch.ones_like(x)
        self.adder(x, into=total)
        return total


class Fragile(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        self.block(x)
        raise RuntimeError("it always fails")


class Caught(nn.Module):
    """Catches its child's exception, which a call stack must survive."""

    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.fragile = Fragile(racing)
        self.plan_b = Combine(False)

    def forward(self, x: Tensor) -> Any:
        try:
            return self.fragile(x)
        except RuntimeError:
            return self.plan_b(x)


class Copying(nn.Module):
    def __init__(self, racing: bool) -> None:
        super().__init__()
        self.block = Combine(racing)

    def forward(self, x: Tensor) -> Any:
        return copy.deepcopy(self.block)(x)


SITUATIONS: dict[str, tuple[Callable[[bool], nn.Module], str]] = {
    "a shared module": (Shared, "first"),
    "repeated calls": (Repeated, "block"),
    "child.forward(x)": (Forwarding, "block"),
    "views changed later": (ViewsChangedLater, "block"),
    "dict outputs in another order": (DictOrder, "block"),
    "dropout and a private generator": (Randomized, "block"),
    "a cache that grows": (GrowingCache, "block"),
    "kwargs changed in place": (KwargsChanged, "adder.inner"),
    "an exception that a parent catches": (Caught, "fragile.block"),
    "a target that deep-copies": (Copying, "Combine#0"),
}
"""Situation to (model, path of the module that races). A copy made in a run belongs to no tree: Class#n."""


def build(name: str, racing: bool) -> Any:
    torch.manual_seed(0)
    return SITUATIONS[name][0](racing)
