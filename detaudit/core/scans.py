"""What a static scan says of kernels. Frozen, JSON in and out; never imports torch.

The JSON form is ``format: "detaudit-scan"``, ``version: 1``. Fields may be added within a version.
History: 1, first version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from detaudit.core.errors import TraceUnreadable, TraceVersion

FORMAT = "detaudit-scan"
VERSION = 1

Category = Literal["accumulation", "unknown", "ticket", "flag", "counter", "barrier"]
"""What an atomic instruction does to the order of threads, the most telling first.

- ``accumulation``: adds or multiplies floating-point values in memory, in the order of arrival;
- ``unknown``: an atomic instruction that this version cannot read;
- ``ticket``: an integer operation whose returned value is used, so that someone learns who came when;
- ``flag``: compare-and-swap or exchange: locks, flags, loops that are no accumulation;
- ``counter``: an integer operation, minimum or maximum that nobody looks at: the same in any order;
- ``barrier``: arrives at, or waits for, a barrier object.
"""
CATEGORIES: tuple[str, ...] = get_args(Category)

Meaning = Literal[
    "can accumulate in an unordered way",
    "holds an atomic instruction that is not understood",
    "takes tickets",
    "no unordered accumulation found",
]
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)


@dataclass(frozen=True, slots=True)
class Atomic:
    """Equal atomic instructions of one kernel.

    Args:
        operation: ``add``, ``max``, ``cas``, ``exch``, ...; ``mul`` only as a loop.
        dtype: ``f32``, ``bf16x8``, ``u32``, ``s32``, ``b64``, ...; ``in tensor map`` for a tensor reduction,
            whose type the host decides at run time.
        scope: ``global``, ``shared``, ``cluster``, ``generic`` (decided by the address at run time), ``bulk``
            (asynchronous copy engine), ``multicast`` (added by the NVLink switch), ``surface``.
        returned: whether the value that was there before is used.
        loop: whether it is a loop around a compare-and-swap.
        mnemonic: opcode with modifiers as the disassembler prints it.
        count: instructions of this form.
    """

    category: Category
    operation: str
    dtype: str
    scope: str
    returned: bool
    loop: bool
    mnemonic: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class KernelScan:
    """One function of one binary.

    Args:
        name: symbol (mangled).
        short: demangled without parameters, and of the template arguments only what tells kernels apart.
        arch: ``sm_90a``.
        file: path of the file it was found in.
        entry: whether the host can launch it; else it is a function that kernels call.
        finalize: ``FINALIZE`` or ``NONE`` for a CUTLASS GEMM, by its epilogue; else None.
        copies: how often this very function occurs in the file.
    """

    name: str
    short: str
    arch: str
    file: str
    entry: bool
    atomics: tuple[Atomic, ...] = ()
    finalize: Literal["FINALIZE", "NONE"] | None = None
    copies: int = 1

    def has(self, category: Category) -> bool:
        return any(atomic.category == category for atomic in self.atomics)

    @property
    def suspect(self) -> bool:
        """Whether it can accumulate in an unordered way."""
        return self.has("accumulation")

    @property
    def meaning(self) -> Meaning:
        if self.suspect:
            return "can accumulate in an unordered way"
        if self.has("unknown"):
            return "holds an atomic instruction that is not understood"
        return "takes tickets" if self.has("ticket") else "no unordered accumulation found"


@dataclass(frozen=True, slots=True)
class FileScan:
    """One scanned file.

    Args:
        images: machine code images (fatbins, cubins) in it.
        functions: functions found in them.
        problem: why not all of it could be read, or None.
    """

    path: str
    images: int
    functions: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """All kernels of all files, suspects first. ``tools``: the disassemblers used, with their versions."""

    kernels: tuple[KernelScan, ...]
    files: tuple[FileScan, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[KernelScan, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.suspect)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "summary": summary(self.kernels),
            "files": [dataclasses.asdict(file) for file in self.files],
            "tools": list(self.tools),
            "kernels": [
                {**dataclasses.asdict(kernel), "suspect": kernel.suspect, "meaning": kernel.meaning}
                for kernel in self.kernels
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScanReport:
        """Inverse of ``to_json``; unknown fields are ignored.

        Raises:
            TraceUnreadable: it is not a scan.
            TraceVersion: it is of a version that this detaudit does not know.
        """
        if data.get("format") != FORMAT:
            raise TraceUnreadable("this is not a scan; write one with 'detaudit scan --format json'")
        if data.get("version") != VERSION:
            raise TraceVersion(
                f"this scan is of version {data.get('version')!r}; this detaudit reads {VERSION}"
            )
        try:
            kernels = tuple(_kernel(item) for item in data["kernels"])
            files = tuple(FileScan(**_known(FileScan, item)) for item in data["files"])
            return cls(kernels, files, tuple(data["tools"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise TraceUnreadable(f"this scan is damaged ({error}); scan again") from error


def summary(kernels: Iterable[KernelScan]) -> dict[str, int]:
    """How many kernels have each meaning; every meaning is a key."""
    counts: dict[str, int] = dict.fromkeys(MEANINGS, 0)
    for kernel in kernels:
        counts[kernel.meaning] += 1
    return counts


def atomic_to_json(atomic: Atomic) -> dict[str, Any]:
    return dataclasses.asdict(atomic)


def atomic_from_json(data: Mapping[str, Any]) -> Atomic:
    return Atomic(**_known(Atomic, data))


def _kernel(data: Mapping[str, Any]) -> KernelScan:
    known = _known(KernelScan, data)
    known["atomics"] = tuple(atomic_from_json(item) for item in data["atomics"])
    return KernelScan(**known)


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in data.items() if key in names}
