"""One line of disassembly: what an atomic instruction does, from its opcode, modifiers and operands.

Opcodes as nvdisasm prints them for SM75 to SM121; NVIDIA lists them in "CUDA Binary Utilities" without
saying what their modifiers mean. What is relied on here was read off compiled kernels; tests/scan has the
source of each, and its machine code for SM80, SM90, SM100 and SM120.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from detaudit.core.scans import Atomic, Category

_LINE: Final = re.compile(
    rb"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*)"
)
ATOMIC_LINE: Final = re.compile(
    rb"\*/\s+\{?\s*(?:@!?U?P\w+\s+)?U?(?:ATOM|RED(?!UX)|BLKRED|TMARED|LDGMC|SYNCS|SURED|SUATOM)"
)
"""Finds the lines worth parsing; warp-wide REDUX and BAR.RED go through no memory."""
_FLOAT: Final = re.compile(r"^(?:BF16|F16|F32|F64)(?:x\d+|_V2)?$")
_INTEGER: Final = re.compile(r"^[USB]?(?:32|64|128)$")
_OPERATIONS: Final = frozenset({"ADD", "MIN", "MAX", "AND", "OR", "XOR", "INC", "DEC", "EXCH", "CAS", "CAST"})
_SCOPES: Final = {
    "RED": "global",
    "REDG": "global",
    "ATOMG": "global",
    "ATOM": "generic",
    "ATOMS": "shared",
    "REDS": "shared",
    "REDAS": "cluster",
    "UBLKRED": "bulk",
    "UTMAREDG": "bulk",
    "UTMARED": "bulk",
    "LDGMC": "multicast",
    "SURED": "surface",
    "SUATOM": "surface",
}
IN_TENSOR_MAP: Final = "in tensor map"
_UNORDERED: Final = frozenset({"add", "mul"})
_BARRIER: Final = frozenset({"ARRIVE", "ARRIVES"})


@dataclass(frozen=True, slots=True)
class Instruction:
    """``modifiers`` are what follows the opcode, dot by dot; ``operands`` are split at commas."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guarded: bool

    @property
    def mnemonic(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    @property
    def address(self) -> int:
        """Index of the operand that is an address in memory, or -1."""
        return next((index for index, operand in enumerate(self.operands) if "[" in operand), -1)


def parse(line: bytes) -> Instruction | None:
    """The instruction of a line of nvdisasm's, or None for a label, a directive and the like."""
    match = _LINE.match(line)
    if match is None:
        return None
    opcode, *modifiers = match["opcode"].decode("ascii").split(".")
    text = match["operands"].decode("ascii", "replace").strip()
    operands = tuple(part.strip() for part in text.split(",")) if text else ()
    return Instruction(opcode, tuple(modifiers), operands, match["guard"] is not None)


def is_swap_loop_candidate(instruction: Instruction) -> bool:
    """Whether it is a compare-and-swap, which may be the heart of a loop that accumulates."""
    return operation_of(instruction) in ("cas", "cast")


def operation_of(instruction: Instruction) -> str | None:
    """``add``, ``cas``, ...; None if no modifier says it."""
    found = [modifier for modifier in instruction.modifiers if modifier in _OPERATIONS]
    if found:
        return found[-1].lower()
    return "inc" if "POPC" in instruction.modifiers else None


def classify(instruction: Instruction) -> Atomic:
    """What an atomic instruction is on its own; a compare-and-swap is a ``flag``, but see ``loops``."""
    if instruction.opcode == "SYNCS" or _BARRIER & set(instruction.modifiers):
        return _atomic(instruction, "barrier", "arrive", "b64", "shared", returned=False)
    operation, scope = operation_of(instruction), scope_of(instruction)
    if operation is None or scope is None:
        return _atomic(instruction, "unknown", operation or "unknown", "unknown", scope or "unknown", False)
    dtype, returned = dtype_of(instruction), returns_value(instruction)
    return _atomic(instruction, _category(operation, dtype, returned), operation, dtype, scope, returned)


def _category(operation: str, dtype: str, returned: bool) -> Category:
    if operation in ("cas", "cast", "exch"):
        return "flag"
    if operation in _UNORDERED and (is_float(dtype) or dtype == IN_TENSOR_MAP):
        return "accumulation"
    return "ticket" if returned else "counter"


def is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


def dtype_of(instruction: Instruction) -> str:
    """Type of the elements: ``f32``, ``bf16x2``, ``s32``, ``b64``; ``u32`` where nothing is printed."""
    for modifier in instruction.modifiers:
        if _FLOAT.match(modifier):
            return modifier.replace("_V2", "x2").lower()
    if instruction.opcode.startswith("UTMARED"):
        return IN_TENSOR_MAP
    for modifier in instruction.modifiers:
        if _INTEGER.match(modifier):
            return modifier.lower() if modifier[0] in "USB" else f"b{modifier}"
    return "b32" if operation_of(instruction) in ("cas", "cast", "exch") else "u32"


def scope_of(instruction: Instruction) -> str | None:
    """Memory it works on; a generic address of 32 bits is one in the shared memory of the cluster."""
    scope = _SCOPES.get(instruction.opcode)
    at = instruction.address
    if scope == "generic" and at >= 0 and "RZ.U32+" in instruction.operands[at]:
        return "cluster"
    return scope


def returns_value(instruction: Instruction) -> bool:
    """Whether a register receives the previous value: the compiler names RZ where nobody reads it."""
    if not instruction.opcode.startswith(("ATOM", "SUATOM")):
        return False
    before = instruction.operands[: max(instruction.address, 0)]
    registers = [operand for operand in before if re.match(r"^U?R(\d+|Z)\b", operand)]
    return bool(registers) and not registers[-1].startswith(("RZ", "URZ"))


def _atomic(
    instruction: Instruction, category: Category, operation: str, dtype: str, scope: str, returned: bool
) -> Atomic:
    return Atomic(category, operation, dtype, scope, returned, False, instruction.mnemonic)
