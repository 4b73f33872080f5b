"""Kernels by module from the profiler: reading its events, and the ranges around real module calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.errors import Unsupported
from detaudit.hooks import launched_kernels
from detaudit.hooks.launched_kernels import PREFIX, LaunchedKernels, launched

Event = Mapping[str, Any]


def opened(module: str, begin: float, duration: float, tid: int = 1) -> Event:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": PREFIX + module,
        "ts": begin,
        "dur": duration,
        "tid": tid,
    }


def launch(
    correlation: int, at: float, tid: int = 1, name: str = "cudaLaunchKernel", cat: str = "cuda_runtime"
) -> Event:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": at,
        "dur": 1,
        "tid": tid,
        "args": {"correlation": correlation},
    }


def kernel(name: str, correlation: int, at: float) -> Event:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": at,
        "dur": 5,
        "tid": 7,
        "args": {"correlation": correlation},
    }


def test_a_kernel_belongs_to_the_innermost_module_that_launched_it() -> None:
    events = [
        opened("", 0, 100),
        opened("layers.0", 10, 40),
        opened("layers.0.experts", 20, 10),
        launch(1, 5),
        launch(2, 15),
        launch(3, 25, name="cuLaunchKernelEx", cat="cuda_driver"),
        launch(4, 35),
        launch(5, 60),
        launch(6, 200),
        # On the GPU they run later, when other modules are open on the host.
        *(kernel(f"k{n}", n, 500 + n) for n in range(1, 7)),
    ]
    assert launched(events) == {
        "": {"k1": 1, "k5": 1},
        "layers.0": {"k2": 1, "k4": 1},
        "layers.0.experts": {"k3": 1},
        None: {"k6": 1},
    }
    assert launched(list(reversed(events))) == launched(events)


def test_threads_are_kept_apart() -> None:
    events = [
        opened("a", 0, 100, tid=1),
        opened("b", 0, 100, tid=2),
        launch(1, 10, tid=1),
        launch(2, 10, tid=2),
    ]
    events += [kernel("k", 1, 20), kernel("k", 2, 30), kernel("k", 3, 40)]
    assert launched(events) == {"a": {"k": 1}, "b": {"k": 1}, None: {"k": 1}}


def test_all_kernels_of_a_graph_belong_to_the_module_that_replays_it() -> None:
    events = [opened("decoder", 0, 100), launch(9, 10, name="cudaGraphLaunch")]
    events += [kernel("gemm", 9, 50), kernel("gemm", 9, 60), kernel("finalize", 9, 70)]
    assert launched(events) == {"decoder": {"gemm": 2, "finalize": 1}}


def test_a_module_that_begins_with_its_parent_is_inside_it() -> None:
    events = [opened("parent.child", 0, 10), opened("parent", 0, 50), launch(1, 5), launch(2, 20)]
    events += [kernel("a", 1, 60), kernel("b", 2, 70)]
    assert launched(events) == {"parent.child": {"a": 1}, "parent": {"b": 1}}


def test_ranges_of_others_and_other_events_are_not_taken_for_modules() -> None:
    events: list[Event] = [
        {**opened("x", 0, 100), "name": "the user's own"},
        launch(1, 10),
        kernel("k", 1, 20),
    ]
    events += [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1}]
    assert launched(events) == {None: {"k": 1}}


def test_launches_without_any_kernel_are_an_error() -> None:
    with pytest.raises(Unsupported, match="CUPTI"):
        launched([opened("", 0, 100), launch(1, 10)])


def test_no_launches_are_no_error() -> None:
    assert launched([opened("", 0, 100)]) == {}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.direct = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.direct.forward(self.inner(x))
        return out


def test_every_module_call_is_a_range_inside_that_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there are no kernels, but the ranges that launches would be found in are the same."""
    kept: list[Event] = []

    def keep(events: list[Event]) -> dict[str | None, dict[str, int]]:
        kept.extend(events)
        return launched(events)

    monkeypatch.setattr(launched_kernels, "launched", keep)
    model, x = Branch(), torch.ones(2, 4)
    expected = model(x)
    tap = LaunchedKernels(model)
    with tap:
        assert torch.equal(model(x), expected)
    ranges = [event for event in kept if str(event.get("name")).startswith(PREFIX)]
    names = {str(event["name"]).removeprefix(PREFIX) for event in ranges}
    assert names == {"", "inner", "inner.0", "inner.1", "direct"}
    # A launch made in the middle of a range is that module's.
    (tid,) = {event["tid"] for event in ranges}
    inner = ("direct", "inner.0", "inner.1")
    made = [launch(n, _middle(ranges, name), tid) for n, name in enumerate(inner)]
    kernels = [kernel(f"in {name}", n, 1e15) for n, name in enumerate(inner)]
    assert launched([*ranges, *made, *kernels]) == {name: {f"in {name}": 1} for name in inner}


def _middle(ranges: list[Event], name: str) -> float:
    (event, *_) = [event for event in ranges if event["name"] == PREFIX + name]
    return float(event["ts"]) + float(event["dur"]) / 2


def test_an_exception_passes_and_nothing_is_left_on() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    model = Raises()
    tap = LaunchedKernels(model)
    with pytest.raises(ValueError, match="mine"), tap:
        model(torch.ones(1))
    assert tap.by_module() == {}
    with LaunchedKernels(model):  # and again: no recording is in progress
        pass
