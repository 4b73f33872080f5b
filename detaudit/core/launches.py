"""Kernels that modules launched, beside what their machine code says. Frozen; never imports torch.

The JSON form is ``format: "detaudit-launches"``, ``version: 1``. Fields may be added within a version.
History: 1, first version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from detaudit.core.scans import Meaning

FORMAT = "detaudit-launches"
VERSION = 1

Launches = Mapping[str | None, Mapping[str, int]]
"""Module path (None: outside of all modules) to kernel name, as the profiler tells it, to launches."""

Judgement = Literal["suspects in an origin", "origin without a suspect", "risk", "nothing found"]


@dataclass(frozen=True, slots=True)
class LaunchedKernel:
    """A kernel that a module launched.

    Args:
        name: as the profiler tells it.
        short: what the scan calls it.
        launches: how often, in one run.
        meaning: what its machine code says; None if no scanned file has it.
        accumulates: how, one text per kind (``add.bf16x8 global``).
        certain: False if several kernels have this name and only some of them can accumulate.
        finalize: ``FINALIZE`` or ``NONE`` for a CUTLASS GEMM.
        files: where its machine code was found.
    """

    name: str
    short: str
    launches: int
    meaning: Meaning | None
    accumulates: tuple[str, ...] = ()
    certain: bool = True
    finalize: str | None = None
    files: tuple[str, ...] = ()

    @property
    def suspect(self) -> bool:
        return bool(self.accumulates)


@dataclass(frozen=True, slots=True)
class ModuleLaunches:
    """What one module launched itself, not counting modules inside it.

    Args:
        module: path in ``named_modules()``; None for what was launched outside of all modules.
        judgement: of the module, with its submodules where it is an origin of its own code.
        explanation: one sentence.
    """

    module: str | None
    kernels: tuple[LaunchedKernel, ...]
    judgement: Judgement
    explanation: str

    @property
    def suspects(self) -> tuple[LaunchedKernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.suspect)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """All modules that launched kernels, origins first, then risks.

    Args:
        audited: whether origins were known; without an audit every suspect is a risk.
        tools: the disassemblers used, with their versions.
    """

    modules: tuple[ModuleLaunches, ...]
    audited: bool
    arch: str | None = None
    tools: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
