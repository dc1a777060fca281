"""Reading SASS: instructions, widths of loads, loops; on texts written by hand."""

from __future__ import annotations

import pytest
from machine_code import Instruction, MachineCode, main_width, parse_sass

EMPTY_LINE = "                              /* 0x000ff00000000800 */"


def sass(*lines: str) -> str:
    """As cuobjdump prints it: an address each 16 bytes, and the encoding behind each line."""
    code = [
        f"        /*{16 * place:04x}*/    {line} ;    /* 0x00000a00ff017b82 */\n{EMPTY_LINE}"
        for place, line in enumerate(lines)
    ]
    return "\n".join(["\tcode for sm_90a", "\t\tFunction : kernel", *code, "\t\t.........."])


def code_of(*lines: str) -> MachineCode:
    return MachineCode(parse_sass(sass(*lines)))


def places(code: MachineCode) -> list[list[int]]:
    return [sorted(loop) for loop in code.loops]


def test_a_line_is_address_guard_opcode_and_operands() -> None:
    first, second = parse_sass(sass("LDC R1, c[0x0][0x28]", "@!P0 LDG.E.128 R4, desc[UR4][R2.64]"))
    assert first == Instruction(0, "LDC", "R1, c[0x0][0x28]", False)
    assert second == Instruction(16, "LDG.E.128", "R4, desc[UR4][R2.64]", True)
    assert second.name == "LDG"


def test_a_text_without_code_is_refused() -> None:
    with pytest.raises(ValueError, match="cuobjdump -sass"):
        parse_sass("Fatbin elf code:")


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        ("LDG.E", 4),
        ("LDG.E.64", 8),
        ("LDG.E.128", 16),
        ("LDG.E.U8", 1),
        ("LDG.E.S8", 1),
        ("LDG.E.U16.CONSTANT", 2),
        ("LDG.E.128.CONSTANT", 16),
        ("LDGSTS.E.BYPASS.LTC128B.128", 16),
        ("LDGSTS.E.LTC128B", 4),
        ("STS.64", 8),
        ("LDC.64", None),
        ("IMAD.WIDE.U32", None),
    ],
)
def test_width_of_an_access(opcode: str, width: int | None) -> None:
    assert Instruction(0, opcode, "", False).width == width


def test_loads_are_counted_by_width_and_stores_are_none() -> None:
    code = code_of(
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "LDGSTS.E.BYPASS.128 [R8], desc[UR4][R2.64]",
        "LDG.E R9, desc[UR4][R2.64]",
        "LDS.128 R4, [R8]",
        "STG.E.64 desc[UR4][R2.64], R4",
        "EXIT",
    )
    assert code.load_widths() == {16: 2, 4: 1}
    assert code.counts(code.reachable)["instructions"] == 6


def test_the_main_width_carries_most_bytes() -> None:
    assert main_width({16: 1, 4: 3}) == 16
    assert main_width({16: 1, 4: 5}) == 4
    assert main_width({16: 1, 4: 4}) == 16
    assert main_width({}) == 0


def test_a_backward_branch_closes_a_loop_and_the_endless_one_behind_the_end_does_not() -> None:
    code = code_of("MOV R0, RZ", "FADD R1, R1, R2", "@P0 BRA 0x10", "EXIT", "BRA 0x40", "NOP")
    assert places(code) == [[1, 2]]
    assert sorted(code.reachable) == [0, 1, 2, 3]


def test_a_predicate_among_the_operands_guards_a_branch() -> None:
    code = code_of("MOV R0, RZ", "BRA P1, 0x0", "BRA.U !UP0, 0x40", "EXIT", "EXIT")
    assert places(code) == [[0, 1]]
    assert sorted(code.reachable) == [0, 1, 2, 3, 4]


def test_a_jump_back_from_code_behind_the_kernel_is_no_loop() -> None:
    lines = ["@P0 BRA 0x40", "MOV R0, RZ", "MOV R1, RZ", "EXIT", "MOV R0, R2", "BRA 0x20"]
    code = code_of(*lines)
    assert places(code) == []
    assert len(code.reachable) == len(lines)


def test_code_for_lanes_that_went_different_ways_is_left_out() -> None:
    code = code_of("BRA.DIV ~URZ, 0x30", "MOV R0, RZ", "EXIT", "MOV R0, R2", "BRA 0x10")
    assert sorted(code.reachable) == [0, 1, 2]
    assert places(code) == []


def test_a_loop_in_a_loop_counts_as_part_of_it_and_the_longest_comes_first() -> None:
    code = code_of(
        *("MOV R0, RZ", "@P0 BRA 0x10"),
        *("SHFL.BFLY R1, R1, 0x1, 0x1f", "STS [R2], R1", "@P1 BRA 0x30", "BAR.SYNC.DEFER_BLOCKING"),
        *("@P2 BRA 0x20", "EXIT"),
    )
    assert places(code) == [[2, 3, 4, 5, 6], [1]]
    counts = {"instructions": 5, "shuffles": 1, "shared_stores": 1, "barriers": 1}
    assert code.counts(code.loops[0]) == counts


def test_two_branches_back_to_one_place_are_one_loop() -> None:
    code = code_of("MOV R0, RZ", "@P0 BRA 0x0", "MOV R1, RZ", "@P1 BRA 0x0", "EXIT")
    assert places(code) == [[0, 1, 2, 3]]
