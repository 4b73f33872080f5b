"""Compare-and-swap loops that accumulate, and those that only look like it."""

from __future__ import annotations

import pytest

from detaudit.core.scans import Atomic
from detaudit.scan.functions import functions


def atomics(*body: str) -> list[Atomic]:
    """Atomics of a function with these instructions."""
    lines = [b'\t.section\t.text.kernel,"ax",@progbits\n']
    lines += [
        f"        /*{16 * n:04x}*/                   {text} ;\n".encode() for n, text in enumerate(body)
    ]
    (function,) = functions(lines, "sm_90a")
    return list(function.atomics)


def kind(*body: str) -> str:
    *_, last = sorted(atomics(*body), key=lambda atomic: atomic.loop)
    return f"{last.category} {last.operation}.{last.dtype}"


def test_an_addition_to_the_old_value_is_an_accumulation() -> None:
    assert (
        kind("LDS R4, [R0]", "FADD R5, R3, R4", "ATOMS.CAST.SPIN R5, [R0], R4, R5") == "accumulation add.f32"
    )


def test_a_predicate_may_be_what_the_swap_returns() -> None:
    assert (
        kind("LDS R4, [R0]", "FADD R5, R3, R4", "ATOMS.CAST.SPIN P0, [R0], R4, R5") == "accumulation add.f32"
    )


def test_a_lock_is_not() -> None:
    assert kind(
        "FADD R7, R8, R9", "MOV R4, RZ", "MOV R5, 0x1", "ATOMG.E.CAS.STRONG.GPU PT, R0, [R2], R4, R5"
    ) == ("flag cas.b32")


def test_a_lock_compared_with_a_constant_that_the_sum_began_with_is_not() -> None:
    swap = "ATOMG.E.CAS.STRONG.GPU PT, R0, [R2], R4, R5"
    assert kind("MOV R4, RZ", "FADD R5, R4, R9", swap) == "flag cas.b32"


def test_a_maximum_is_not() -> None:
    swap = "ATOMG.E.CAS.STRONG.GPU PT, R7, [R2], R6, R7"
    assert kind("LDG.E R6, [R2]", "FMNMX R7, R7, R6, !PT", swap) == "flag cas.b32"


def test_an_integer_addition_is_not() -> None:
    swap = "ATOMG.E.CAS.STRONG.GPU PT, R7, [R2], R6, R7"
    assert kind("LDG.E R6, [R2]", "IADD3 R7, R6, R9, RZ", swap) == "flag cas.b32"


def test_a_conversion_is_not() -> None:
    """HADD2.F32 with -RZ turns a half into a float, which is how the maximum of halves is taken."""
    body = (
        "LDG.E R6, [R2]",
        "HADD2.F32 R8, -RZ, R6.H0_H0",
        "FMNMX R8, R8, R9, !PT",
        "F2FP.F16.F32.PACK_AB R7, RZ, R8",
    )
    assert kind(*body, "ATOMG.E.CAS.STRONG.GPU PT, R7, [R2], R6, R7") == "flag cas.b32"


def test_a_score_that_is_swapped_in_but_was_not_added_to_the_old_value_is_not() -> None:
    body = ("FFMA R10, R11, R12, R13", "LDG.E R6, [R2]", "FMNMX R7, R10, R6, !PT")
    assert kind(*body, "ATOMG.E.CAS.STRONG.GPU PT, R7, [R2], R6, R7") == "flag cas.b32"


def test_halves_in_a_word_are_followed_through_bit_operations() -> None:
    body = (
        "LD.E R7, [R4.64]",
        "SHF.R.U32.HI R8, RZ, 0x10, R7",
        "HADD2.BF16_V2 R3, R8, R2.H0_H0",
        "PRMT R3, R7, R0, R3",
    )
    assert kind(*body, "ATOM.E.CAS.STRONG.GPU PT, R6, [R4], R7, R3") == "accumulation add.bf16"


def test_both_registers_of_a_pair_are_followed() -> None:
    body = ("LDG.E.64 R4, [R2.64]", "DADD R6, R4, R8")
    assert kind(*body, "ATOMG.E.CAS.64.STRONG.GPU PT, R6, [R2], R4, R6") == "accumulation add.f64"


def test_a_guarded_instruction_does_not_hide_the_one_before() -> None:
    body = ("LDS R4, [R0]", "FADD R5, R3, R4", "@P1 MOV R5, R9")
    assert kind(*body, "ATOMS.CAST.SPIN R5, [R0], R4, R5") == "accumulation add.f32"


def test_an_unguarded_instruction_does() -> None:
    body = ("LDS R4, [R0]", "FADD R5, R3, R4", "MOV R5, R9")
    assert kind(*body, "ATOMS.CAST.SPIN R5, [R0], R4, R5") == "flag cast.b32"


@pytest.mark.parametrize("operands", ["R5, [R0]", "R5", ""])
def test_a_swap_without_its_operands_is_a_flag(operands: str) -> None:
    assert kind(f"ATOMS.CAST.SPIN {operands}") == "flag cast.b32"


def test_instructions_of_another_function_are_not_followed() -> None:
    lines = [
        b'\t.section\t.text.first,"ax",@progbits\n',
        b"        /*0000*/                   LDS R4, [R0] ;\n",
        b"        /*0010*/                   FADD R5, R3, R4 ;\n",
        b'\t.section\t.text.second,"ax",@progbits\n',
        b"        /*0000*/                   ATOMS.CAST.SPIN R5, [R0], R4, R5 ;\n",
    ]
    first, second = functions(lines, "sm_80")
    assert (first.atomics, second.atomics[0].category) == ((), "flag")
