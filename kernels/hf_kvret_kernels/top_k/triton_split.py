"""The highest of any number of scores, in three launches.

The first counts the scores in bins, in which the threshold is looked for; its last program finds
the bin that holds it. The second writes down the scores of that bin, and its last program finds the
threshold among them to the bit. The third writes the positions of what is taken, each block behind
the blocks before it. Nothing waits for the host.

Bins are as narrow as floats of seven bits behind the point from 1/4 to 64 of either sign: of
log-shares in that range the threshold's bin has a few hundred. Scores beyond it share the outer
bins, and the second launch then takes longer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import _ahead as ahead
from hf_kvret_kernels._triton_log_sums import best_share, sum_up
from hf_kvret_kernels._triton_places import fill_empty
from hf_kvret_kernels.top_k.triton_order import NOTHING, order_of

# Tokens of a program; and what the last one takes at once, of blocks or of the threshold's bin.
_TOKENS = 1024
_CHUNK = 1024
# Orders of a row begin at multiples of so many.
_UNIT = 4
_BINS = tl.constexpr(2048)
_HALF = tl.constexpr(1024)
# What programs count in: bins, a ticket of the first launch and one of the second, and how many
# scores lie in the threshold's bin. Rows of a multiple of 16 bytes.
_COUNTERS = tl.constexpr(2052)
# Numbers of a row's plan: the threshold's bin, how many of it are taken, how many in all, the
# threshold, and the last place that is taken on it.
_PLAN = tl.constexpr(5)
# The first 16 bits of 1/4.
_LEAST_BITS = tl.constexpr(0x3E80)
_CHANGING = (
    *("stride_b", "stride_h", "stride_q", "stride_g"),
    *("sum_stride_b", "sum_stride_h", "sum_stride_q", "sum_stride_g"),
    *("length", "units", "pieces", "count"),
)


def split_top_k(
    scores: torch.Tensor,
    count: int,
    ids: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 places of the highest, ascending, -1 behind; the first of equals.

    Args:
        scores: ``[B, H, Q, G, n]`` fp32; G heads select together, by the largest of their shares.
        ids: ``[B, H, Q, n]`` int32, contiguous, to give instead of the places.
        sums: ``[B, H, Q, G, pieces]`` fp32: log-sum-exps of pieces of scores. None where G is 1,
            and the order is that of the scores.
    """
    batch, heads, queries, group, length = scores.shape
    assert group == 1 or sums is not None
    lead, device = (batch, heads, queries), scores.device
    out = torch.empty(*lead, count, dtype=torch.int32, device=device)
    if out.numel() == 0:
        return out
    rows, blocks, units = out.numel() // count, triton.cdiv(length, _TOKENS), -(-length // _UNIT)
    counters = torch.zeros(rows, _COUNTERS.value, dtype=torch.int32, device=device)
    orders = torch.empty(rows, units * _UNIT, dtype=torch.int32, device=device)
    border_places = torch.empty(rows, length, dtype=torch.int32, device=device)
    plan = torch.empty(rows, _PLAN.value, dtype=torch.int32, device=device)
    before = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
    grid = (rows, blocks)
    made = out, counters, orders, border_places, plan, before
    pieces = 0 if sums is None else sums.shape[-1]
    for launch in _launches(scores, ids, sums, made, (length, units, pieces, count)):
        launch.kernel[grid](*launch.arguments, **launch.constants)
    return out


def compile_ahead(
    scores: torch.Tensor, ids: torch.Tensor | None, sums: torch.Tensor | None, pieces: int
) -> None:
    """Compile what ``split_top_k`` launches for such arguments, with so many ``pieces`` in sums."""
    length = scores.shape[4]
    numbers = length, -(-length // _UNIT), pieces, 1
    for launch in _launches(scores, ids, sums, (torch.int32,) * 6, numbers):
        ahead.compile_ahead(launch.kernel, launch.arguments, launch.constants)


def pieces_of(length: int) -> int:
    """At least so many pieces are in the sums of ``length`` scores; beyond 2 all count alike."""
    return 1 if length <= _TOKENS else 2


class _Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _launches(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    sums: torch.Tensor | None,
    made: Sequence[Any],
    numbers: tuple[int, int, int, int],
) -> list[_Launch]:
    """The three of them.

    Args:
        made: what is written, from ``out`` to ``before``, or their dtypes.
        numbers: length, units, pieces and count.
    """
    out, counters, orders, border_places, plan, before = made
    length, units, pieces, count = numbers
    sum_strides = (0, 0, 0, 0) if sums is None else sums.stride()[:4]
    always = {"BLOCK": _TOKENS, "UNIT": _UNIT, "enable_fp_fusion": True}
    return [
        _Launch(
            _count_kernel,
            (
                *(scores, scores if sums is None else sums, orders, counters, plan),
                *scores.stride(),
                *sum_strides,
                *(*scores.shape[1:3], length, units, pieces, count),
            ),
            always | {"G": scores.shape[3], "PIECES": 1 if pieces <= 1 else 256},
        ),
        _Launch(
            _border_kernel,
            (orders, border_places, counters, plan, before, length, units, count),
            always | {"CHUNK": _CHUNK},
        ),
        _Launch(
            _compact_kernel,
            (orders, plan, before, out if ids is None else ids, out, length, units, count),
            always | {"HAS_IDS": ids is not None},
        ),
    ]


@triton.jit
def _bins_of(order):
    """The bin of each of ``order``, an integer of ``order_of``; bins ascend with them."""
    first = order >> 16
    size = first ^ (first >> 31)
    step = tl.minimum(tl.maximum(size - _LEAST_BITS, 0), _HALF - 1)
    return tl.where(first < 0, _HALF - 1 - step, _HALF + step)


@triton.jit
def _load_orders(orders_ptr, row, places, length, units, UNIT: tl.constexpr):
    """Of these places of a row; ``NOTHING`` behind its end."""
    orders_ptr += row * units * UNIT + places
    return tl.load(orders_ptr, mask=places < units * UNIT, other=NOTHING)


@triton.jit(do_not_specialize=_CHANGING)
def _count_kernel(
    scores_ptr,
    sums_ptr,
    orders_ptr,
    counters_ptr,
    plan_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_g,
    stride_n,
    sum_stride_b,
    sum_stride_h,
    sum_stride_q,
    sum_stride_g,
    heads,
    queries,
    length,
    units,
    pieces,
    count,
    G: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Orders of a block of a row, and how many lie in each bin."""
    row = tl.program_id(0).to(tl.int64)
    b, h, q = row // queries // heads, row // queries % heads, row % queries
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    scores_ptr += b * stride_b + h * stride_h + q * stride_q + places.to(tl.int64) * stride_n
    sums_ptr += b * sum_stride_b + h * sum_stride_h + q * sum_stride_q
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for _ in range(G):
        score = tl.load(scores_ptr, mask=inside, other=float("-inf"))
        scores_ptr += stride_g
        if G == 1:
            best = score
        else:
            best = best_share(best, score, sum_up(sums_ptr, pieces, PIECES))
            sums_ptr += sum_stride_g
    order = order_of(best)
    tl.store(orders_ptr + row * units * UNIT + places, order, mask=places < units * UNIT)

    bins = tl.arange(0, _BINS)
    bin_counts = tl.histogram(_bins_of(order), _BINS)
    # What is never taken went to the first bin.
    nothing = tl.sum((order == NOTHING).to(tl.int32), axis=0)
    bin_counts = tl.where(bins == 0, bin_counts - nothing, bin_counts)
    counters_ptr += row * _COUNTERS
    tl.atomic_add(counters_ptr + bins, bin_counts, mask=bin_counts > 0, sem="relaxed")
    # All that the program has counted is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + _BINS, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        bin_counts = tl.load(counters_ptr + bins, cache_modifier=".cg")
        total = tl.sum(bin_counts, axis=0)
        at_least = total - tl.cumsum(bin_counts, axis=0) + bin_counts
        # Below all bins where everything is taken.
        border = tl.max(tl.where(at_least >= count, bins, -1), axis=0)
        border = tl.where(total > count, border, -1)
        above = tl.sum(tl.where(bins > border, bin_counts, 0), axis=0)
        plan_ptr += row * _PLAN
        tl.store(plan_ptr, border)
        tl.store(plan_ptr + 1, tl.minimum(count, total) - above)
        tl.store(plan_ptr + 2, tl.minimum(count, total))


@triton.jit(do_not_specialize=_CHANGING)
def _border_kernel(
    orders_ptr,
    border_ptr,
    counters_ptr,
    plan_ptr,
    before_ptr,
    length,
    units,
    count,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Places of a block in the threshold's bin, and how many of it lie above."""
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    order = _load_orders(orders_ptr, row, places, length, units, UNIT)
    border = tl.load(plan_ptr + row * _PLAN)
    bins = tl.where(order == NOTHING, -2, _bins_of(order))
    before_ptr += row * blocks
    tl.store(before_ptr + block, tl.sum((bins > border).to(tl.int32), axis=0))
    on_border = (bins == border).to(tl.int32)
    number = tl.sum(on_border, axis=0)
    border_ptr += row * length
    counters_ptr += row * _COUNTERS + _BINS
    if number > 0:
        # In the order of arrival, on which nothing depends.
        ahead = tl.atomic_add(counters_ptr + 2, number, sem="relaxed")
        slots = ahead + tl.cumsum(on_border, axis=0) - on_border
        tl.store(border_ptr + slots, places, mask=on_border > 0)
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel") == blocks - 1:
        number = tl.load(counters_ptr + 2, cache_modifier=".cg")
        _settle(
            orders_ptr + row * units * UNIT,
            *(border_ptr, number, plan_ptr + row * _PLAN, before_ptr, blocks, length),
            *(BLOCK, CHUNK),
        )


@triton.jit
def _settle(
    orders_ptr,
    border_ptr,
    number,
    plan_ptr,
    before_ptr,
    blocks,
    length,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The threshold of a row, the last place that is taken on it, and what each block is behind.

    ``number`` places lie in the threshold's bin; the plan has how many of them are taken.
    """
    threshold = tl.full((), NOTHING, tl.int32)
    last = length
    if number > 0:
        wanted = tl.load(plan_ptr + 1)
        threshold, wanted, equal = _highest(
            orders_ptr, border_ptr, number, wanted, threshold, False, CHUNK
        )
        if equal > wanted:
            last, wanted, equal = _highest(
                orders_ptr, border_ptr, number, wanted, threshold, True, CHUNK
            )
            last = -1 - last
        for start in range(0, number, CHUNK):
            here = start + tl.arange(0, CHUNK)
            inside = here < number
            places = tl.load(border_ptr + here, mask=inside, other=0, cache_modifier=".cg")
            order = tl.load(orders_ptr + places, mask=inside, other=NOTHING)
            taken = inside & ((order > threshold) | ((order == threshold) & (places <= last)))
            tl.atomic_add(before_ptr + places // BLOCK, 1, mask=taken, sem="relaxed")
        tl.debug_barrier()
    tl.store(plan_ptr + 3, threshold)
    tl.store(plan_ptr + 4, last)
    behind = tl.zeros((), tl.int32)
    for start in range(0, blocks, CHUNK):
        others = start + tl.arange(0, CHUNK)
        mask = others < blocks
        taken = tl.load(before_ptr + others, mask=mask, other=0, cache_modifier=".cg")
        tl.store(before_ptr + others, behind + tl.cumsum(taken, axis=0) - taken, mask=mask)
        behind += tl.sum(taken, axis=0)


@triton.jit
def _highest(
    orders_ptr,
    border_ptr,
    number,
    wanted,
    threshold,
    BY_PLACE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``(limit, wanted, equal)``: what ``wanted`` of ``number`` integers reach, by eight bits.

    The integers are orders; or, BY_PLACE, ``-1 - place`` of those whose order is ``threshold``.
    ``wanted`` of the ``equal`` ones at the limit itself are still to be taken.
    """
    digits = tl.arange(0, 256)
    prefix = tl.zeros((), tl.uint32)
    equal = number
    for level in tl.static_range(4):
        digit_counts = tl.zeros((256,), tl.int32)
        for start in range(0, number, CHUNK):
            here = start + tl.arange(0, CHUNK)
            inside = here < number
            places = tl.load(border_ptr + here, mask=inside, other=0, cache_modifier=".cg")
            order = tl.load(orders_ptr + places, mask=inside, other=NOTHING)
            key = order
            if BY_PLACE:
                inside = inside & (order == threshold)
                key = -1 - places
            key = key.to(tl.uint32, bitcast=True) ^ 0x80000000
            if level > 0:
                inside = inside & ((key >> (32 - 8 * level)) == prefix)
            own = ((key >> (24 - 8 * level)) & 255).to(tl.int32)
            # As many again: what is not counted goes to the first of those.
            found = tl.histogram(tl.where(inside, own, 256), 512)
            digit_counts += tl.sum(
                tl.where(tl.arange(0, 2)[:, None] == 0, tl.reshape(found, (2, 256)), 0), axis=0
            )
        at_least = tl.sum(digit_counts, axis=0) - tl.cumsum(digit_counts, axis=0) + digit_counts
        digit = tl.max(tl.where(at_least >= wanted, digits, 0), axis=0)
        wanted -= tl.sum(tl.where(digits > digit, digit_counts, 0), axis=0)
        equal = tl.sum(tl.where(digits == digit, digit_counts, 0), axis=0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return (prefix ^ 0x80000000).to(tl.int32, bitcast=True), wanted, equal


@triton.jit(do_not_specialize=_CHANGING)
def _compact_kernel(
    orders_ptr,
    plan_ptr,
    before_ptr,
    ids_ptr,
    out_ptr,
    length,
    units,
    count,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Places of a block that are taken, behind those of the blocks before it."""
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    order = _load_orders(orders_ptr, row, places, length, units, UNIT)
    plan_ptr += row * _PLAN
    threshold, last = tl.load(plan_ptr + 3), tl.load(plan_ptr + 4)
    selection = (order > threshold) | ((order == threshold) & (places <= last))
    selection = selection & (order != NOTHING)
    taken = selection.to(tl.int32)
    slots = tl.load(before_ptr + row * blocks + block) + tl.cumsum(taken, axis=0) - taken
    result = places
    if HAS_IDS:
        result = tl.load(ids_ptr + row * length + places, mask=selection, other=-1)
    out_ptr += row * count
    tl.store(out_ptr + slots, result, mask=selection)
    fill_empty(out_ptr, tl.load(plan_ptr + 2), count, block, blocks, BLOCK)
