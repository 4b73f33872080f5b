"""Backends whose kernels behave as told, so that every outcome can be reached on any machine.

None of them shows that a real kernel varies; for that there are tests with real races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from detaudit.kernels.backend import (
    Available,
    Backend,
    Fill,
    Guidance,
    Options,
    Poison,
    Prepared,
    Role,
    Unavailable,
    Variant,
)
from detaudit.kernels.cases import Case
from detaudit.kernels.shapes import Synthetic

ENTRY = "tests.fakes:kernel"

Kernel = Callable[[int, Tensor], Tensor]
"""Given how many runs of the variant came before and what its output buffer holds, the output."""


def output() -> Tensor:
    return torch.linspace(-2, 2, 24).view(4, 6).to(torch.bfloat16)


def stable(_run: int, _buffer: Tensor) -> Tensor:
    return output()


def racy(run: int, _buffer: Tensor) -> Tensor:
    """Every run after the first differs from it, in one element by one ULP or more."""
    result = output()
    result.view(torch.int16)[run % 4, 0] += run
    return result


def reads_its_output(_run: int, buffer: Tensor) -> Tensor:
    """Leaves a row unwritten."""
    result = output()
    result[3] = buffer[3]
    return result


def failing(after: int) -> Kernel:
    def kernel(run: int, buffer: Tensor) -> Tensor:
        if run >= after:
            raise RuntimeError("CUDA error: an illegal memory\n access was encountered")
        return stable(run, buffer)

    return kernel


@dataclass
class FakeVariant:
    """``fused``: what the kernel says it took."""

    name: str
    kernel: Kernel
    role: Role
    can_fuse: bool = False
    fused: bool | None = False
    asked: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def variant(self) -> Variant:
        return Variant(self.name, self.settings, self.role, self.can_fuse, self.asked)


@dataclass
class FakeBackend:
    """``log`` holds ``variant:event`` for every call the runner makes."""

    fakes: Sequence[FakeVariant]
    cannot: str | None = None
    unavailable: Unavailable | None = None
    fails_to_prepare: str | None = None
    reference: Tensor | None = None
    name: str = "fake"
    sweeps: tuple[str, ...] = ()
    log: list[str] = field(default_factory=list)

    def accepts(self, case: Case) -> bool:
        return case.entry == ENTRY

    def availability(self, case: Case) -> Available | Unavailable:
        return self.unavailable or Available(torch.device("cpu"))

    def cannot_differ(self, case: Case) -> str | None:
        return self.cannot

    def variants(self, case: Case, options: Options) -> Sequence[Variant]:
        return [fake.variant() for fake in self.fakes]

    def prepare(self, case: Case, variant: Variant) -> Prepared:
        if variant.name == self.fails_to_prepare:
            raise ValueError("no such tactic")
        fake = next(fake for fake in self.fakes if fake.name == variant.name)
        return FakePrepared(fake, self.log)

    def reference_fp64(self, case: Case) -> Tensor | None:
        return self.reference

    def guidance(self, case: Case, variant: Variant) -> Guidance:
        return Guidance({"flashinfer": f"kernel(..., {variant.name})"}, ("mind the gap",))

    def synthetic(self, wanted: Synthetic) -> Case | Unavailable:
        return self.unavailable or fake_case()


class FakePrepared:
    def __init__(self, fake: FakeVariant, log: list[str]) -> None:
        self.fake = fake
        self.log = log
        self.runs = 0
        self.is_active = False
        self.buffer = output()
        self._poison = Poison(self.buffer)

    @contextmanager
    def active(self) -> Iterator[None]:
        self.is_active = True
        self.log.append(f"{self.fake.name}:enter")
        try:
            yield
        finally:
            self.is_active = False
            self.log.append(f"{self.fake.name}:exit")

    def poison(self, fill: Fill) -> None:
        assert self.is_active
        self.log.append(f"{self.fake.name}:{fill}")
        self._poison(fill)

    def run(self) -> Tensor:
        assert self.is_active
        self.log.append(f"{self.fake.name}:run")
        result = self.fake.kernel(self.runs, self.buffer)
        self.runs += 1
        return result

    def tactic(self) -> str | None:
        return f"tactic of {self.fake.name}"

    def fused(self) -> bool | None:
        return self.fake.fused


def fake_case(**tensors: Tensor) -> Case:
    return Case("case", ENTRY, tensors, {}, module="layers.0.mlp.experts", call=0)


def control(kernel: Kernel, *, fused: bool | None = True, asked: bool = False) -> FakeVariant:
    return FakeVariant("pinned", kernel, "control", can_fuse=True, fused=fused, asked=asked)


def candidate(kernel: Kernel, name: str = "unfused", *, asked: bool = False) -> FakeVariant:
    return FakeVariant(name, kernel, "candidate", settings={"use_fused_finalize": False}, asked=asked)


def typechecks(backend: FakeBackend) -> Backend:
    """mypy proves here that the fake is a backend."""
    return backend
