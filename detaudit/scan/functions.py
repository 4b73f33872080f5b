"""From the disassembly of an image, line by line, to what each function holds. Nothing is kept whole."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from detaudit.core.scans import CATEGORIES, Atomic
from detaudit.scan.loops import WINDOW, as_accumulation
from detaudit.scan.sass import ATOMIC_LINE, Instruction, classify, is_swap_loop_candidate, parse

_SECTION: Final = re.compile(rb"^\s*\.section\s+\.text\.([^,\"\s]+|\"[^\"]*\")")
_TARGET: Final = re.compile(rb"^\s*\.target\s+(sm_\w+)")
_FLAGS: Final = re.compile(rb"^\s*\.headerflags\s.*?(EF_CUDA_ACCELERATORS )?EF_CUDA_SM(\d+)")
"""What images made before CUDA 13 have in place of a target; accelerators stand for the suffix ``a``."""
_ENTRY: Final = b"STO_CUDA_ENTRY"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of an image: symbol, architecture, whether the host can launch it, its atomics."""

    name: str
    arch: str
    entry: bool
    atomics: tuple[Atomic, ...]


class _Open:
    """The function that is being read."""

    def __init__(self, name: str, arch: str) -> None:
        self.name, self.arch, self.entry = name, arch, False
        self.counts: Counter[Atomic] = Counter()
        self.lines: deque[bytes] = deque(maxlen=WINDOW)

    def line(self, line: bytes) -> None:
        if ATOMIC_LINE.search(line) and (instruction := parse(line)) is not None:
            self.counts[self._atomic(instruction)] += 1
        self.lines.append(line)

    def _atomic(self, instruction: Instruction) -> Atomic:
        atomic = classify(instruction)
        if not is_swap_loop_candidate(instruction):
            return atomic
        before = [found for line in self.lines if (found := parse(line)) is not None]
        return as_accumulation(instruction, atomic, before) or atomic

    def close(self) -> Function:
        atomics = [replace(atomic, count=count) for atomic, count in self.counts.items()]
        atomics.sort(key=lambda atomic: (CATEGORIES.index(atomic.category), atomic.mnemonic, atomic.dtype))
        return Function(self.name, self.arch, self.entry, tuple(atomics))


def functions(lines: Iterable[bytes], arch: str) -> Iterator[Function]:
    """Functions in the output of ``nvdisasm -c``.

    Args:
        arch: architecture where the output does not name one.
    """
    current: _Open | None = None
    for line in lines:
        if b"/*" in line[:12]:
            if current is not None:
                current.line(line)
        elif (section := _SECTION.match(line)) is not None:
            if current is not None:
                yield current.close()
            current = _Open(section[1].strip(b'"').decode("utf-8", "replace"), arch)
        elif _ENTRY in line and current is not None:
            current.entry = True
        elif (target := _TARGET.match(line)) is not None:
            arch = target[1].decode("ascii")
        elif (flags := _FLAGS.match(line)) is not None:
            arch = f"sm_{flags[2].decode('ascii')}{'a' if flags[1] else ''}"
    if current is not None:
        yield current.close()
