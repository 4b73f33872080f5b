"""A CUDA graph on the CPU: operators are noted while it is captured, and run again into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detaudit.core.device.queue import CapturedPending
from detaudit.core.digest import HostDigester, Pending, Ready, digest
from detaudit.core.recording import Value


class CpuGraph:
    """Takes the place of ``torch.cuda.CUDAGraph``; one is captured at a time."""

    current: ClassVar[CpuGraph | None] = None

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def capture_begin(self, pool: object = None) -> None:
        if CpuGraph.current is not None:
            raise RuntimeError("a capture is in progress")
        self.steps = []
        CpuGraph.current = self
        self._mode = _Noting(self.steps)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        CpuGraph.current = None
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        for step in self.steps:
            step()

    def reset(self) -> None:
        self.steps = []


class _Noting(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

        def step() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **(kwargs or {}))) if isinstance(leaf, Tensor)]
            for tensor, new in zip(results, again, strict=True):
                if tensor.data_ptr() != new.data_ptr():
                    tensor.copy_(new)

        self._steps.append(step)
        return result


@contextmanager
def captured(graph: CpuGraph) -> Iterator[None]:
    """What ``torch.cuda.graph`` does."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


class CpuSlots:
    def __init__(self) -> None:
        self.values: list[Value] = []
        self.replays = 0

    def before_replay(self) -> None:
        self.replays += 1

    def replayed(self) -> Sequence[Pending]:
        return [Ready(value) for value in self.values]


class GraphingDigester(HostDigester):
    """Digests at once; while a ``CpuGraph`` is captured, digests become steps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: CpuSlots | None = None

    def submit(self, tensor: Tensor) -> Any:
        graph = CpuGraph.current
        if graph is None or _is_host(tensor):
            return super().submit(tensor)
        slots = self.slots = self.slots or CpuSlots()
        index = len(slots.values)
        slots.values.append(digest(torch.zeros(())))

        def step() -> None:
            slots.values[index] = digest(tensor)

        graph.steps.append(step)
        return CapturedPending(index)

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        return [self.submit(tensor) for tensor in tensors]

    def prepare_capture(self) -> None:
        if CpuGraph.current is not None:
            raise RuntimeError("memory cannot be taken while a graph is captured")

    def take_capture(self) -> CpuSlots | None:
        slots, self.slots = self.slots, None
        return slots


def _is_host(tensor: Tensor) -> bool:
    """Integers stand for host tensors here, everything else for tensors on the device."""
    return tensor.dtype in (torch.uint8, torch.int64)
