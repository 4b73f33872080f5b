"""What a kernel backend implements. Runner, outcomes and recommendation know kernels only through this.

The life of a confirmation: ``accepts`` says whose case it is, ``availability`` whether it can run here,
``variants`` which configurations to run. The runner moves the case to the device once and calls
``prepare`` for each variant; a ``Prepared`` variant is then poisoned and run some hundred times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from detaudit.kernels.cases import Case
from detaudit.kernels.shapes import Synthetic

Role = Literal["control", "candidate", "listed"]
"""``control``: must be able to differ, or the comparison shows nothing. ``candidate``: a setting that an
engine can use. ``listed``: shown only, never recommended (a pinned tactic, a graph replay)."""

Fill = Literal["zeros", "ones", "random"]
"""What a buffer holds before a run: bytes 0x00, bytes 0xFF (a NaN in every float format), random bytes."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of one kernel.

    Args:
        name: unique within the case.
        settings: what is set, JSON-compatible, as the report shows it.
        role: what the variant is run for.
        can_fuse: whether a fused-finalize tactic can be taken under these settings; asked of the runner
            that owns the tactics, never concluded from what was taken.
        asked: whether these are the case's own settings. At most one variant is; times are ratios to it.
    """

    name: str
    settings: Mapping[str, Any]
    role: Role
    can_fuse: bool
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """``sweeps``: additional sets of variants, from ``Backend.sweeps``."""

    sweeps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Available:
    """The case can run on ``device``."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The case cannot run here. ``reason``: why not; ``needs``: what could run it (GPUs, versions)."""

    reason: str
    needs: str

    @property
    def sentence(self) -> str:
        return f"{self.reason}; it runs on {self.needs}"


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a variant is set.

    Args:
        where: library or engine (``flashinfer``, ``vllm``, ``sglang``, ``tensorrt_llm``, ...) to the argument
            or switch that sets it there, or to why there is none.
        warnings: what to look out for when setting it.
    """

    where: Mapping[str, str]
    warnings: tuple[str, ...] = ()


class Prepared(Protocol):
    """A variant ready to run on the tensors of one case."""

    def active(self) -> AbstractContextManager[object]:
        """What must hold around this variant's runs (an autotuner's cache, a stream); entered per batch."""
        ...

    def poison(self, fill: Fill) -> None:
        """Fill the output and the workspace of the next run, on the current stream, without synchronising."""
        ...

    def run(self) -> Tensor:
        """Run once on the current stream, without synchronising; may return the same buffer each time."""
        ...

    def tactic(self) -> str | None:
        """What the last run was carried out with, such as ``gemm1 12, gemm2 63``; ``None`` if unknown."""
        ...

    def fused(self) -> bool | None:
        """Whether the last run took the fused finalize; ``None`` if this cannot be told."""
        ...


class Backend(Protocol):
    """One kernel, or one family of kernels behind the same entry point."""

    @property
    def name(self) -> str: ...

    @property
    def sweeps(self) -> tuple[str, ...]:
        """Sets of variants that are run only when asked for, such as ``tactics``."""
        ...

    def accepts(self, case: Case) -> bool:
        """Whether the case was captured from this backend's kernel."""
        ...

    def availability(self, case: Case) -> Available | Unavailable: ...

    def cannot_differ(self, case: Case) -> str | None:
        """Why no configuration could give different bits for this case, as a sentence part, or ``None``."""
        ...

    def variants(self, case: Case, options: Options) -> Sequence[Variant]:
        """The variants to run; the asked one first. ``case`` lies on the device it will run on."""
        ...

    def prepare(self, case: Case, variant: Variant) -> Prepared:
        """Allocate and tune what the variant needs. May raise anything: the variant then did not run."""
        ...

    def reference_fp64(self, case: Case) -> Tensor | None:
        """The output computed in float64 from the same (quantized) operands; ``None`` if there is none."""
        ...

    def guidance(self, case: Case, variant: Variant) -> Guidance:
        """How to set the variant in the kernel's own call and in the engines that call it."""
        ...

    def synthetic(self, wanted: Synthetic) -> Case | Unavailable:
        """A made-up case on the device it will run on, or why it cannot run here (then nothing is allocated).

        Raises:
            UsageError: a dtype that this kernel does not have.
        """
        ...


def commutes(top_k: int) -> str | None:
    """Why a sum of ``top_k`` rounded terms onto zero has the same bits in any order; ``None`` if it may not.

    0 + a + b and 0 + b + a round once, at the same value; from three terms on the order shows.
    """
    if top_k > 2:
        return None
    return f"top_k is {top_k}, and zero plus at most two rounded terms is the same in either order"


class Poison:
    """Fills buffers byte by byte, in whatever dtype they are, without synchronising.

    Random bytes come from a generator of its own, so that the target's random state is left alone.
    """

    def __init__(self, *buffers: Tensor, seed: int = 0) -> None:
        """``buffers``: contiguous tensors on one device."""
        self._words: list[Tensor] = []
        self._tails: list[Tensor] = []
        self._generator = torch.Generator(buffers[0].device).manual_seed(seed)
        for buffer in buffers:
            data = buffer.detach().view(-1).view(torch.uint8)
            whole = 0 if data.storage_offset() % 8 else data.numel() // 8 * 8
            if whole:
                self._words.append(data[:whole].view(torch.int64))
            if whole < data.numel():
                self._tails.append(data[whole:])

    def __call__(self, fill: Fill) -> None:
        if fill == "random":
            # Eight bytes a draw: a workspace of hundreds of megabytes is filled before every run.
            for words in self._words:
                words.random_(-(2**63), None, generator=self._generator)
            for tail in self._tails:
                tail.random_(0, 256, generator=self._generator)
        else:
            for words in self._words:
                words.fill_(-1 if fill == "ones" else 0)
            for tail in self._tails:
                tail.fill_(255 if fill == "ones" else 0)
