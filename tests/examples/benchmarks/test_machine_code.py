"""``machine_code.py`` reads SASS; its step has the methods' own sizes."""

import math

import pytest
import step_kernels
from machine_code import Instruction, Launch, MachineCode, parse_sass, table_of
from step_kernels import LEAST_CONTEXT, StepShape

from hf_kvret.methods.a2ats import A2ATSConfig
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import RetrievalConfig


def code_of(*lines: str) -> MachineCode:
    """As cuobjdump prints it: an address each 16 bytes, and the encoding behind each line."""
    encoding = "/* 0x000ff00000000800 */"
    code = [
        f"        /*{16 * place:04x}*/    {line} ;    {encoding}\n          {encoding}"
        for place, line in enumerate(lines)
    ]
    return MachineCode(parse_sass("\n".join(["\t\tFunction : kernel", *code, "\t\t....."])))


def places(code: MachineCode) -> list[list[int]]:
    return [sorted(loop) for loop in code.loops]


def test_lines_become_instructions_with_their_guards() -> None:
    code = code_of("LDC R1, c[0x0][0x28]", "@!P1 LDG.E.128 R4, desc[UR4][R2.64]")
    first, second = code.instructions
    assert first == Instruction(0, "LDC", "R1, c[0x0][0x28]", False)
    assert second == Instruction(16, "LDG.E.128", "R4, desc[UR4][R2.64]", True)
    assert second.name == "LDG"
    with pytest.raises(ValueError, match="no SASS"):
        parse_sass("")


@pytest.mark.parametrize(
    ("opcode", "width"),
    [
        *(("LDG.E", 4), ("LDG.E.128", 16), ("LDG.E.U8", 1), ("LDG.E.U16.CONSTANT", 2)),
        *(("LDGSTS.E.BYPASS.LTC128B.128", 16), ("LDGSTS.E.LTC128B", 4), ("STS.64", 8)),
        *(("LDC.64", None), ("IMAD.WIDE.U32", None)),
    ],
)
def test_width_of_an_access(opcode: str, width: int | None) -> None:
    assert Instruction(0, opcode, "", False).width == width


def test_a_backward_branch_closes_a_loop_and_the_endless_one_behind_the_end_does_not() -> None:
    code = code_of("MOV R0, RZ", "FADD R1, R1, R2", "@P0 BRA 0x10", "EXIT", "BRA 0x40", "NOP")
    assert places(code) == [[1, 2]]
    assert sorted(code.reachable) == [0, 1, 2, 3]


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


def test_the_table_has_a_line_for_each_kernel() -> None:
    counts = {"instructions": 110, "shuffles": 5, "shared_stores": 4, "barriers": 3}
    in_loops = {"instructions": 10, "shuffles": 1, "shared_stores": 1, "barriers": 1}
    widths = {"16": 3, "4": 1}
    launch = Launch(
        *("merge", 131_072, 1, "merge.merge", 1, (32, 2, 1), 4, 2048, 40, 8, 16, widths, 1),
        *(counts, in_loops),
    )
    words = [word.strip() for word in table_of([launch]).splitlines()[-1].split("|")]
    assert words[1:11] == [
        *("merge", "merge.merge", "64", "4", "40", "8", "2048", "12", "16", "16: 3, 4: 1")
    ]
    assert words[11:15] == ["110 / 10", "5 / 1", "4 / 1", "3 / 1"]


def test_the_step_has_the_methods_own_numbers() -> None:
    for context in (LEAST_CONTEXT, 131_072, 1 << 20):
        paris, shape = ParisConfig(), StepShape(context, 1)
        length = shape.cold_len
        beta, rho = paris.ratios(length)
        assert (math.ceil(beta * length), rho) == (shape.candidates, step_kernels.PARIS_RHO)
        assert paris.tiers_for(16) == step_kernels.PARIS_SHARES
        assert paris.tiers_for(43) == step_kernels.PARIS_LONG_ROW_SHARES
        ctkvr = CTkvrConfig()
        assert ctkvr.list_len(length, 1024) == step_kernels.LIST_LEN
        assert ctkvr.nprobe == step_kernels.NPROBE
    assert CTkvrConfig().centroids_for(131_072) == step_kernels.CENTROIDS
    assert RetrievalConfig.bits == step_kernels.HIGGS_BITS
    assert A2ATSConfig().top_k == step_kernels.A2ATS_RATIO
    assert LRQKConfig().budget(StepShape(131_072, 1).cold_len) == step_kernels.LRQK_K
    sizes = RetrievalConfig.sink + RetrievalConfig.recent + RetrievalConfig.flush
    assert sizes == step_kernels.WINDOW_LEN
