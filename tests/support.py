"""Helpers shared by tests: modules that really race, their stable twins, and a digester that answers late.

On the CPU, ``index_put_(accumulate=True)`` in fp32 adds from several threads in no fixed order, above about
32,768 elements; ``index_add_``, fp64, bf16 and integers do not. Modules here race only with
``torch.set_num_threads`` of two or more: use the fixture ``racy``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from detaudit.core.digest import HostDigester, NotObservable, Pending
from detaudit.core.recording import Call, Value

if TYPE_CHECKING:
    from detaudit.hooks.recorder import Recording

TOKENS, TOP_K, HIDDEN, EXPERTS = 1024, 8, 512, 16


@contextmanager
def threads(count: int) -> Iterator[None]:
    """``torch.set_num_threads(count)`` inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def combine_racing(contributions: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Sum rows per token, in no fixed order. ``contributions``: [rows, hidden], ``tokens``: [rows]."""
    out = contributions.new_zeros(count, contributions.shape[1])
    return out.index_put_((tokens,), contributions, accumulate=True)


def combine_ordered(contributions: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The same sum, row after row."""
    out = contributions.new_zeros(count, contributions.shape[1])
    return out.index_add_(0, tokens, contributions)


def race_varies(attempts: int = 20) -> bool:
    """Whether the race has just been seen to give different bits for equal inputs, in this process."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS * TOP_K, HIDDEN, generator=generator)
    tokens = torch.randperm(TOKENS * TOP_K, generator=generator) % TOKENS
    first = combine_racing(rows, tokens, TOKENS)
    return any(not torch.equal(first, combine_racing(rows, tokens, TOKENS)) for _ in range(attempts))


class Experts(nn.Module):
    """Top-k experts whose combine races (``racing``) or adds in order. ``forward(x, chosen, weights)``.

    x: [tokens, hidden] fp32; chosen: [tokens, top_k] int64; weights: [tokens, top_k] fp32.
    """

    def __init__(self, racing: bool, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        self.racing = racing
        self.scale = nn.Parameter(torch.randn(experts, hidden))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count, top_k = chosen.shape
        # Sorted by expert, as kernels do it: the rows of one token lie far apart, so that threads meet there.
        order = chosen.flatten().argsort(stable=True)
        tokens = order // top_k
        rows = x[tokens] * self.scale[chosen.flatten()[order]] * weights.flatten()[order, None]
        combine = combine_racing if self.racing else combine_ordered
        return combine(rows, tokens, count)


class Mixture(nn.Module):
    """A gate and experts: ``gate``, ``experts``."""

    def __init__(
        self, racing: bool, hidden: int = HIDDEN, experts: int = EXPERTS, top_k: int = TOP_K
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(racing, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        out: Tensor = self.experts(x, chosen, weights)
        return out


class Layer(nn.Module):
    def __init__(self, racing: bool, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mlp = Mixture(racing, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Stack(nn.Module):
    """Layers ``layers.N.mlp.experts``; only the layers numbered in ``racing`` race."""

    def __init__(self, racing: tuple[int, ...] = (0,), layers: int = 2, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i in racing, hidden) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LateDigester:
    """Answers like a device: no digest can be read before ``finish``."""

    def __init__(self) -> None:
        self._host = HostDigester()
        self._waiting: list[_Late] = []
        self.submitted = 0
        self.finished = 0

    def submit(self, tensor: Tensor) -> Pending:
        return self._late(self._host.submit(tensor).value)

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        return [self.submit(tensor) for tensor in tensors]

    def submit_scalar(self, scalar: object) -> Pending:
        return self._late(self._host.submit_scalar(scalar).value)

    def finish(self) -> None:
        self.finished += 1
        for pending in self._waiting:
            pending.ready = True
        self._waiting.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def _late(self, value: Value) -> _Late:
        self.submitted += 1
        pending = _Late(value)
        self._waiting.append(pending)
        return pending


class _Late:
    def __init__(self, value: Value) -> None:
        self._value = value
        self.ready = False

    @property
    def value(self) -> Value:
        if not self.ready:
            raise RuntimeError("read before finish()")
        return self._value


class LeftOver(TorchDispatchMode):
    """Fresh memory holds bytes that ``fill`` gives, as if something else had used it before."""

    def __init__(self, fill: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            overwrite(result, self.fill())
        return result


def overwrite(memory: Tensor, fill: int) -> None:
    """Set every byte; no operator takes part."""
    ctypes.memset(memory.data_ptr(), fill, memory.nbytes)


class RefusingDigester(HostDigester):
    """Cannot digest anything, each time with another kind of error."""

    def submit(self, tensor: Tensor) -> Any:
        if tensor.dim() == 0:
            raise NotObservable("it is refused")
        raise RuntimeError("out of memory\nand more lines")


def paths(recording: Recording) -> list[str]:
    """Module paths of the calls, in order."""
    return [call.module for call in recording.calls]


def sites(record: tuple[tuple[str, Value], ...]) -> list[str]:
    return [site for site, _ in record]


def call_of(recording: Recording, module: str, ordinal: int = 0) -> Call:
    """The call of that module; fails where there is none."""
    return next(c for c in recording.calls if (c.module, c.ordinal) == (module, ordinal))
