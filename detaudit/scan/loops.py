"""Loops around a compare-and-swap: an accumulation if the value swapped in is the old one plus something.

There is no atomic instruction for floats in shared memory, nor for products, nor for 16-bit floats on older
GPUs, so the compiler writes ``do { new = old + x; } while (!swap(address, old, new))``. A lock looks the
same but for the data: its new value does not come from an addition. Hence the new value is traced back
through the instructions before the swap, in the order in which they are laid out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from detaudit.core.scans import Atomic
from detaudit.scan.sass import Instruction

WINDOW: Final = 256
"""Instructions looked at before a swap; the loops the compiler makes have fewer than thirty."""

_REGISTER: Final = re.compile(r"(?<![\w.])(U?R\d+)\b")
_ARITHMETIC: Final = re.compile(r"^U?([FHD])(?:ADD|MUL|FMA)(2?)")
_COPIES: Final = re.compile(r"^U?(?:MOV|PRMT|LOP3|SHF|SHL|SHR|SEL|SGXT|BMSK|R2UR|CS2R|F2F|F2FP|I2F)")
_COPYING_IMAD: Final = frozenset({"MOV", "SHL", "U32"})
_NO_RESULT: Final = re.compile(
    r"^U?(?:ST|RED|BRA|EXIT|BSSY|BSYNC|BAR|MEMBAR|YIELD|NOP|CALL|RET|CCTL|WARPSYNC)"
)
_WIDTHS: Final = {"64": 2, "WIDE": 2, "128": 4}

Origin = int | str
"""Where a value comes from: index of the instruction that made it, or a register set before the window."""


def as_accumulation(swap: Instruction, atomic: Atomic, before: Sequence[Instruction]) -> Atomic | None:
    """The accumulation that a loop around ``swap`` makes, or None for a lock, a flag, a maximum.

    Args:
        atomic: what the swap is on its own.
        before: instructions before the swap in the same function, in layout order.
    """
    at = swap.address
    compared, swapped_in = swap.operands[at + 1 : at + 2], swap.operands[at + 2 : at + 3]
    if at < 0 or not compared or not swapped_in:
        return None
    old = _copies_of(before, len(before), _registers(compared[0]))
    if not old:
        return None
    for index in sorted(_sources(before, len(before), _registers(swapped_in[0]), copies_only=False), key=str):
        if isinstance(index, int) and _adds(before[index]):
            instruction = before[index]
            if old & _sources(before, index, _read(instruction), copies_only=False):
                operation = "mul" if "MUL" in instruction.opcode else "add"
                dtype = _dtype(instruction)
                return replace(
                    atomic,
                    category="accumulation",
                    operation=operation,
                    dtype=dtype,
                    returned=False,
                    loop=True,
                )
    return None


def _copies_of(before: Sequence[Instruction], end: int, registers: set[str]) -> set[Origin]:
    """Where the old value comes from, through moves and bit operations only; constants are left out."""
    found = _sources(before, end, registers, copies_only=True)
    return {
        origin
        for origin in found
        if isinstance(origin, str) or _read(before[origin]) or _loads(before[origin])
    }


def _sources(
    before: Sequence[Instruction], end: int, registers: set[str], *, copies_only: bool
) -> set[Origin]:
    """Instructions that ``registers`` depend on before ``end``, and registers that come from further back."""
    wanted, found = set(registers), set[Origin]()
    for index in range(end - 1, -1, -1):
        instruction = before[index]
        written = _written(instruction) & wanted
        if not written:
            continue
        found.add(index)
        if not instruction.guarded:
            wanted -= written
        if not copies_only or _is_copy(instruction):
            wanted |= _read(instruction)
    return found | wanted


def _adds(instruction: Instruction) -> bool:
    """Whether it combines two floating-point values; with one register it converts, or moves a constant."""
    return bool(_ARITHMETIC.match(instruction.opcode)) and len(_read(instruction)) > 1


def _is_copy(instruction: Instruction) -> bool:
    if instruction.opcode == "IMAD":
        return bool(_COPYING_IMAD & set(instruction.modifiers))
    converts = bool(_ARITHMETIC.match(instruction.opcode)) and not _adds(instruction)
    return converts or bool(_COPIES.match(instruction.opcode))


def _loads(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("LD", "ULD", "ATOM"))


def _registers(operand: str) -> set[str]:
    return set(_REGISTER.findall(operand))


def _destination(instruction: Instruction) -> int:
    """Index of the first operand that is a register written; predicates come before it. -1: none."""
    if _NO_RESULT.match(instruction.opcode):
        return -1
    for index, operand in enumerate(instruction.operands[:2]):
        if re.match(r"^U?R(\d+|Z)\b", operand):
            return index
        if not re.match(r"^U?P(\d|T)\b", operand):
            return -1
    return -1


def _written(instruction: Instruction) -> set[str]:
    at = _destination(instruction)
    match = re.match(r"^(U?R)(\d+)", instruction.operands[at]) if at >= 0 else None
    if match is None:
        return set()
    width = max((_WIDTHS.get(modifier, 1) for modifier in instruction.modifiers), default=1)
    if instruction.opcode.startswith("D"):
        width = 2
    return {f"{match[1]}{int(match[2]) + offset}" for offset in range(width)}


def _read(instruction: Instruction) -> set[str]:
    at = _destination(instruction)
    read = (operand for index, operand in enumerate(instruction.operands) if index != at)
    return {register for operand in read for register in _registers(operand)}


def _dtype(instruction: Instruction) -> str:
    match = _ARITHMETIC.match(instruction.opcode)
    kind = match[1] if match else "F"
    if kind == "H":
        return "bf16" if any("BF16" in modifier for modifier in instruction.modifiers) else "f16"
    return "f64" if kind == "D" else "f32"
