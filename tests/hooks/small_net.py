"""A small model whose blocks count their calls, and how to record it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester
from detaudit.hooks.recorder import Recorder, Recording


class Block(nn.Module):
    """Counts its calls, in a buffer and in an attribute."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.steps = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.count += 1
        self.steps += 1
        out: Tensor = self.linear(x) * scale
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, scale=2.0))
        return out


def recorder_of(model: object, **options: Any) -> Recorder:
    recorder = Recorder(HostDigester(), **options)
    recorder.attach(model)
    return recorder


def record(model: Any, *args: Any, **options: Any) -> Recording:
    with torch.no_grad(), recorder_of(model, **options).run() as recording:
        model(*args)
    return recording


X = torch.arange(8.0).view(2, 4)
