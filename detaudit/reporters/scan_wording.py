"""A scan in words: what the reporters have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from detaudit.core.scans import MEANINGS, Atomic, Category, KernelScan, Meaning, ScanReport, summary

DOCS = "docs/scan.md"
CAVEAT = (
    "Read from the machine code: a suspect can differ, and need not; no suspect is evidence, not proof "
    f"(races, uninitialised memory and choices of the host are not seen). See {DOCS}."
)
EXPLAINED: Mapping[Meaning, str] = {
    "can accumulate in an unordered way": "It adds floating-point values to memory in the order in which "
    "threads arrive. Rounding makes the sum depend on that order wherever three or more values meet.",
    "holds an atomic instruction that is not understood": "This version of detaudit cannot read one of its "
    "atomic instructions.",
    "takes tickets": "Threads learn from an integer counter in which order they came; what they do with it "
    "decides whether the order shows in the result.",
    "no unordered accumulation found": "Nothing in its machine code adds floating-point values in the order "
    "of arrival.",
}
_CATEGORIES: Mapping[Category, str] = {
    "accumulation": "accumulates",
    "unknown": "not understood",
    "ticket": "ticket",
    "flag": "flag",
    "counter": "counter",
    "barrier": "barrier",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that read the same in a table: instances of one template with the same atomics."""

    short: str
    arch: str
    meaning: Meaning
    finalize: str | None
    atomics: tuple[str, ...]
    kernels: int


def atomic_text(atomic: Atomic) -> str:
    """``accumulates add.bf16x8 global``."""
    returned = ", value used" if atomic.returned and atomic.category == "accumulation" else ""
    loop = " (swap loop)" if atomic.loop else ""
    what = f"{atomic.operation}.{atomic.dtype} {atomic.scope}{loop}{returned}"
    if atomic.category == "barrier":
        return _CATEGORIES[atomic.category]
    if atomic.category == "unknown":
        return f"{_CATEGORIES[atomic.category]}: {atomic.mnemonic}"
    return f"{_CATEGORIES[atomic.category]} {what}"


def atomics_text(kernel: KernelScan, categories: Iterable[Category] | None = None) -> tuple[str, ...]:
    """One text per kind of atomic, the most telling first, each once; of all categories if None."""
    wanted = None if categories is None else set(categories)
    return tuple(
        dict.fromkeys(
            atomic_text(atomic) for atomic in kernel.atomics if wanted is None or atomic.category in wanted
        )
    )


def groups(kernels: Iterable[KernelScan]) -> list[Group]:
    """Kernels grouped for a table, in the order of their meanings and names."""
    counted = Counter(
        (kernel.short, kernel.arch, kernel.meaning, kernel.finalize, atomics_text(kernel))
        for kernel in kernels
    )
    found = [
        Group(short, arch, meaning, finalize, atomics, count)
        for (short, arch, meaning, finalize, atomics), count in counted.items()
    ]
    return sorted(found, key=lambda group: (MEANINGS.index(group.meaning), group.short, group.arch))


def finalize_table(kernels: Iterable[KernelScan]) -> list[tuple[str, int, int]]:
    """(FINALIZE or NONE, kernels, suspects among them) of the CUTLASS GEMMs; empty if there are none."""
    rows = []
    listed = list(kernels)
    for kind in ("FINALIZE", "NONE"):
        own = [kernel for kernel in listed if kernel.finalize == kind]
        if own:
            rows.append((kind, len(own), sum(kernel.suspect for kernel in own)))
    return rows


def summary_lines(report: ScanReport) -> list[str]:
    """``36 kernels can accumulate in an unordered way``, ...; meanings nobody has are left out."""
    counts = summary(report.kernels)
    lines = [
        f"{count:,} {'kernel' if count == 1 else 'kernels'} {_verb(meaning, count)}"
        for meaning, count in counts.items()
        if count
    ]
    if lines:
        return lines
    if any(file.images for file in report.files):
        return ["no kernel found: none in the machine code there is of what was asked for"]
    return [
        "no kernel found: nothing here holds machine code, as before a first compilation or in a CPU build"
    ]


def _verb(meaning: str, count: int) -> str:
    if meaning == "no unordered accumulation found":
        return f"with {meaning}"
    if count > 1 and meaning.startswith(("holds", "takes")):
        first, rest = meaning.split(" ", 1)
        return f"{first.removesuffix('s')} {rest}"
    return meaning
