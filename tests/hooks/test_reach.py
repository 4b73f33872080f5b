"""What the walk enters, what it calls it, and what it must not touch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from detaudit.hooks.reach import reachable


class Mark:
    """An object that is easy to find again."""


def paths(value: object) -> list[str]:
    return [path for path, found in reachable("x", value) if isinstance(found, (Mark, torch.Tensor))]


@dataclass(slots=True)
class Slotted:
    kept: object
    empty: object = None


Pair = namedtuple("Pair", ["left", "right"])


def test_paths_read_like_sites() -> None:
    value = {"a": [Mark(), Pair(Mark(), 1)], "b c": Slotted(Mark()), 3: torch.ones(1)}
    assert paths(value) == ["x.a[0]", "x.a[1].left", "x['b c'].kept", "x[3]"]


def test_modules_are_entered_by_their_named_paths() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    model[0].mark = Mark()  # type: ignore[assignment]
    assert set(paths(model)) == {
        "x.0.weight",
        "x.0.mark",
        "x.1.running_mean",
        "x.1.running_var",
        "x.1.num_batches_tracked",
    }


def test_an_object_met_twice_has_its_first_path() -> None:
    mark = Mark()
    assert paths([[mark], mark]) == ["x[0][0]"]


class Proxy:
    """Loads something heavy when it is touched, as lazy packages and remote handles do."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"touched: {name}")

    @property
    def heavy(self) -> object:
        raise AssertionError("computed")


class LazyMapping(dict[str, object]):
    """As transformers' maps from a configuration to its model's class: asking for the items imports them."""

    def items(self) -> Any:
        raise AssertionError("imported everything")


class LazyList(list[object]):
    def __iter__(self) -> Any:
        raise AssertionError("imported everything")


def test_nothing_foreign_runs() -> None:
    assert paths([Proxy(), Mark()]) == ["x[1]"]
    assert paths([LazyMapping(a=Mark()), LazyList([Mark()])]) == ["x[0].a", "x[1][0]"]


def test_the_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detaudit.hooks.reach._NODE_LIMIT", 10)
    assert len(list(reachable("x", [Mark() for _ in range(100)]))) == 10
