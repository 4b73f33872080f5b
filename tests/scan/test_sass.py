"""Single instructions, as nvdisasm printed them for kernels of several GPUs and libraries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detaudit.core.scans import CATEGORIES
from detaudit.scan.sass import ATOMIC_LINE, classify, parse

LINES = [
    ("@P0 RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R4.64], R3 ;", "accumulation add f32 global"),
    ("REDG.E.ADD.BF16x8.RN.STRONG.GPU desc[UR14][R36.64], R4 ;", "accumulation add bf16x8 global"),
    ("RED.E.ADD.BF16_V2.RN.STRONG.GPU [R4.64], R3 ;", "accumulation add bf16x2 global"),
    ("REDG.E.MAX.F16x8.RN.STRONG.GPU desc[UR4][R4.64], R8 ;", "counter max f16x8 global"),
    ("RED.E.ADD.S32.STRONG.GPU [R4.64], R3 ;", "counter add s32 global"),
    ("RED.E.ADD.64.STRONG.GPU [R4.64], R2 ;", "counter add b64 global"),
    ("ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR4][R4.64], R11 ;", "ticket add u32 global returned"),
    ("ATOMG.E.ADD.STRONG.GPU PT, RZ, desc[UR4][R4.64], R11 ;", "counter add u32 global"),
    ("ATOMG.E.INC.STRONG.GPU PT, R5, [R4.64], R9 ;", "ticket inc u32 global returned"),
    ("ATOMS.POPC.INC.32 RZ, [R0+URZ] ;", "counter inc b32 shared"),
    ("ATOMS.POPC.INC.32 R3, [R0+URZ] ;", "ticket inc b32 shared returned"),
    ("ATOMS.OR RZ, [R2], R3 ;", "counter or u32 shared"),
    ("ATOMG.E.EXCH.STRONG.GPU PT, RZ, [R6.64+UR32], R5 ;", "flag exch b32 global"),
    ("ATOMG.E.CAS.64.STRONG.GPU PT, R6, [R2], R4, R6 ;", "flag cas b64 global returned"),
    ("@!P1 ATOM.E.ADD.F32.FTZ.RN.STRONG.GPU P0, RZ, [RZ.U32+UR4], R5 ;", "accumulation add f32 cluster"),
    ("UBLKRED.G.S.ADD.F16.RN [UR6], [UR4], UR5 ;", "accumulation add f16 bulk"),
    ("UBLKRED.G.S.MIN.F16 [UR6], [UR4], UR5 ;", "counter min f16 bulk"),
    ("UTMAREDG.3D.ADD [UR4], [UR6] ;", "accumulation add in tensor map bulk"),
    ("UTMAREDG.1D.MAX [UR4], [UR6] ;", "counter max in tensor map bulk"),
    ("SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ ;", "barrier arrive b64 shared"),
    ("ATOMS.ARRIVE.64 R4, [R0] ;", "barrier arrive b64 shared"),
    ("ATOMG.E.NEWOP.F32 PT, R5, [R4.64], R9 ;", "unknown unknown unknown global"),
    ("ATOMX.E.ADD.F32 R5, [R4.64], R9 ;", "unknown add unknown unknown"),
]


def line(text: str) -> bytes:
    return f"        /*0080*/                   {text}\n".encode()


@pytest.mark.parametrize(("text", "expected"), LINES)
def test_what_an_instruction_is(text: str, expected: str) -> None:
    assert ATOMIC_LINE.search(line(text))
    instruction = parse(line(text))
    assert instruction is not None
    atomic = classify(instruction)
    words = [atomic.category, atomic.operation, atomic.dtype, atomic.scope, *["returned"] * atomic.returned]
    assert " ".join(words) == expected


@pytest.mark.parametrize(
    "text",
    [
        "REDUX.SUM UR5, R0 ;",
        "CREDUX.MAX.S32 UR5, R2 ;",
        "UREDUX.SUM UR5, R0 ;",
        "BAR.RED.POPC.DEFER_BLOCKING 0x0 ;",
        "LDG.E R7, desc[UR4][R4.64] ;",
        "FADD R5, R3, R4 ;",
        "MATCH.ANY R4, R3 ;",
    ],
)
def test_what_goes_through_no_memory_is_not_looked_at(text: str) -> None:
    assert not ATOMIC_LINE.search(line(text))


def test_a_line_of_an_old_dual_issue_listing() -> None:
    instruction = parse(b"        /*0008*/         {         RED.E.ADD.F32.FTZ.RN [R2], R0 ;\n")
    assert instruction is not None
    assert instruction.mnemonic == "RED.E.ADD.F32.FTZ.RN"


@pytest.mark.parametrize("text", [b"", b".L_x_1:\n", b'\t.section\t.text.k,"ax",@progbits\n', b"\xff\xfe"])
def test_other_lines_are_no_instructions(text: bytes) -> None:
    assert parse(text) is None


@given(
    st.from_regex(r"(ATOM|ATOMG|ATOMS|RED|REDG|UBLKRED|LDGMC|SUATOM)(\.[A-Z0-9x_]{1,6}){0,5}", fullmatch=True)
)
def test_any_modifiers_give_some_category(opcode: str) -> None:
    instruction = parse(line(f"{opcode} PT, R5, [R4.64], R9 ;"))
    assert instruction is not None
    assert classify(instruction).category in CATEGORIES
