"""The model's arithmetic: who fits on a multiprocessor, how long issuing and moving take."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from compile_step import compile_parts
from kernel_launch import Block, Launch, launch_of
from machine_model import H200, pipe_of, pipe_slots
from step_kernels import LEAST_CONTEXT, StepShape
from step_work import Work, work_of

CHIP = replace(
    H200, multiprocessors=10, schedulers=4, clock=1e9, bandwidth=1e12, rates={"memory": 1.0}
)


@pytest.mark.parametrize(
    ("registers", "warps", "shared_bytes", "ctas"),
    [
        # 65,536 registers; 228 KiB with one for the driver; 2,048 threads; 32 CTAs.
        (128, 16, 0, 1),
        (129, 16, 0, 0),
        (64, 4, 0, 8),
        (65, 4, 0, 7),
        (16, 1, 0, 32),
        (16, 8, 0, 8),
        (16, 4, 71_680, 3),
        (16, 4, 227 << 10, 1),
        (16, 4, 228 << 10, 0),
    ],
)
def test_ctas_that_fit_on_a_multiprocessor(
    registers: int, warps: int, shared_bytes: int, ctas: int
) -> None:
    assert H200.ctas_at_once(registers, warps, shared_bytes) == ctas


@pytest.mark.parametrize(
    ("warps", "ctas", "cycles"),
    [
        # One warp issues an instruction a cycle, four have a scheduler each.
        (1, 1, 100),
        (4, 10, 100),
        (5, 10, 200),
        # The multiprocessor with the most of 11 CTAs has two.
        (4, 11, 200),
        (4, 20, 200),
    ],
)
def test_issue_time_is_that_of_the_fullest_multiprocessor(
    warps: int, ctas: int, cycles: int
) -> None:
    assert CHIP.issue_seconds(100, {}, warps, ctas) == pytest.approx(cycles / 1e9)


def test_the_slowest_pipe_counts() -> None:
    assert CHIP.issue_seconds(100, {"memory": 20, "other": 80}, 4, 10) == pytest.approx(100e-9)
    assert CHIP.issue_seconds(100, {"memory": 60, "other": 40}, 4, 10) == pytest.approx(240e-9)


def test_dram_time() -> None:
    assert CHIP.dram_seconds(2_000_000) == pytest.approx(2e-6)
    assert H200.dram_seconds(4_300_000) == pytest.approx(1e-6)


def test_wide_accesses_take_more_slots() -> None:
    assert [pipe_slots("memory", width) for width in (None, 1, 4, 16)] == [1, 1, 1, 4]
    assert pipe_slots("fp32", None) == 1
    assert [pipe_of(name) for name in ("FFMA", "IMAD", "HMMA", "MUFU", "LDGSTS", "BRA")] == [
        *("fp32", "product", "tensor", "special", "memory", "other")
    ]


def block(instructions: int) -> Block:
    return Block(instructions, {"other": float(instructions)}, 1, 2, 3, {"16": 1})


def launch(*loops: int) -> Launch:
    blocks = [block(count) for count in loops]
    grid = (H200.multiprocessors, 1, 1)
    return Launch("merge", 1, 1, "merge.merge", 2, grid, 4, 32, 0, 0, 16, block(100), blocks)


def test_loops_run_as_often_as_their_trips_say() -> None:
    cycles = {(1.0,): 160, (10.0,): 700, (10.0, 0.0): 200, (0.0, 2.5): 225}
    for trips, count in cycles.items():
        seconds = 2 * count / H200.clock
        assert launch(10, 50).issue_seconds(trips) == pytest.approx(seconds), trips
    assert launch(10, 50).in_loops("barriers") == 6
    assert launch(10, 50).load_widths == {"16": 3}


def test_what_is_left_to_the_last_of_several_is_done_once() -> None:
    last = replace(block(30), of_last=True)
    own = replace(launch(10), last=last, grid=(2 * H200.multiprocessors, 1, 1))
    own = replace(own, loops=[block(10), replace(block(5), of_last=True)])
    # Two CTAs of four warps a multiprocessor; then one on some of them, or two.
    assert own.issue_seconds((1, 4)) == pytest.approx(2 * (220 + 50) / H200.clock)
    many = H200.multiprocessors + 1
    assert own.issue_seconds((1, 4), many) == pytest.approx(2 * (220 + 100) / H200.clock)


def test_a_launch_comes_back_from_json() -> None:
    one = launch(10)
    for own in (one, replace(one, last=replace(block(3), of_last=True))):
        assert launch_of(json.loads(json.dumps(asdict(own)))) == own


def test_bytes_of_kernels_at_the_8b_shape() -> None:
    shape = StepShape(131_072, 1)
    cold = 131_072 - 260
    assert shape.cold_len == cold and shape.candidates == 13_082
    signs, mask, words, histogram = 8 * cold * 16, cold, 8 * 16 * 256 * 4, 8 * 256 * 4
    grid = (511, 8, 1)
    counts = 8 * 511 * (2 * 128 + 8)
    assert work_of("paris", "paris.collide", shape, grid) == Work(
        signs + mask + words, 8 * cold + histogram + counts, (2,), last_ctas=8
    )
    # 2,048 rows of 512 bytes for 8 heads, in 64 pieces of one tile.
    work = work_of("attend-2048", "gather_attention.attend", shape, (8, 64, 1))
    assert work.trips == (1,) and work.read_bytes > 8 * 2048 * 512
    work = work_of("attend-2048", "gather_attention.attend", shape, (8, 16, 1))
    assert work.trips == (4,)
    twice = work_of("paris", "paris.rerank", StepShape(131_072, 2), (511, 16, 1)).moved_bytes
    assert twice == 2 * work_of("paris", "paris.rerank", shape, grid).moved_bytes


@pytest.mark.parametrize(
    ("count", "batch", "pieces", "own_pieces", "trips"),
    [
        # Heads fill the device with 13 pieces of one tile; a block of ids for each program.
        *((100, 1, 4, 13, (0, 1)), (2048, 1, 64, 13, (0, 1))),
        # Two pieces of seven tiles; 100 ids of 64 heads are 13 blocks, 2,048 are 256.
        *((100, 8, 4, 2, (7, 0, 1)), (2048, 8, 8, 2, (7, 1, 1))),
    ],
)
def test_merging_reads_as_many_pieces_as_attention_makes(
    count: int, batch: int, pieces: int, own_pieces: int, trips: tuple[int, ...]
) -> None:
    shape, grid = StepShape(131_072, batch), (1, 8 * batch, own_pieces)
    rows = (8 * batch, pieces, 1)
    made = work_of(f"attend-{count}", "gather_attention.attend", shape, rows).written_bytes
    window = work_of("window", "prompt_attention.attend", shape, grid)
    finish = work_of(f"finish-{count}", "step_attention.finish", shape, grid)
    assert finish.read_bytes == made + window.read_bytes + 4 * 8 * batch * count
    assert finish.written_bytes > window.written_bytes
    assert finish.trips == trips and finish.last_ctas == 8 * batch
    merge = work_of("merge", "merge.merge", shape, (32 * batch, 1, 1))
    assert merge.read_bytes * own_pieces == window.written_bytes * (own_pieces + 1)


def test_a_kernel_or_part_that_nobody_described_is_named() -> None:
    pytest.importorskip("triton", reason="Triton compiles on Linux only")
    shape = StepShape(LEAST_CONTEXT, 1)
    with pytest.raises(KeyError, match=r"step_work.py has no merge.split in merge"):
        work_of("merge", "merge.split", shape, (1, 1, 1))
    with pytest.raises(RuntimeError, match=r"invalid choice: 'rivers' \(choose from '?paris"):
        compile_parts(["merge", "rivers"], LEAST_CONTEXT, 1)
