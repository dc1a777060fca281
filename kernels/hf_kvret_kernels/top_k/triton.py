"""The highest scores in Triton: in a single launch where these are few, else in two.

In one launch each program chooses the best of a block of candidates, and the last program of a row
to arrive chooses among those. In two launches, for any number of scores:

1. the scores of a row are counted in 2,048 bins;
2. programs write down what lies in the threshold's bin, and a bit for each score above it. The last
   one of a row to arrive settles the threshold, eight bits after the other, and goes through the
   bits to write what is taken.

Nothing is sorted, and nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import _dispatch as dispatch
from hf_kvret_kernels._triton_shared import best_share, fill_empty, sum_up

NOTHING = tl.constexpr(-2147483648)
"""The order of scores of -inf, which are never taken: below all others."""
_GREATEST = tl.constexpr(2147483647)
# Bits of -inf and of -0.0 as signed integers.
_MINUS_INF = tl.constexpr(-8388608)
_MINUS_ZERO = tl.constexpr(-2147483648)
# Arguments that change with the number of tokens held.
_CHANGING = (
    *("stride_b", "stride_h", "stride_q", "stride_g"),
    *("sum_stride_b", "sum_stride_h", "sum_stride_q", "sum_stride_g"),
    *("length", "units", "chunks", "count"),
)
# Tokens of a program of the two launches, and what the last one takes at once: words of bits, or
# tokens of the threshold's bin.
_TOKENS = 1024
_CHUNK = 1024
# Log-sum-exps of a row that a program adds up at a time.
_SUMS = 256
# Orders of a row begin at multiples of so many.
_UNIT = 4
_BINS = tl.constexpr(2048)
_HALF = tl.constexpr(1024)
# Programs count in these: bins, a ticket of the first launch and one of the second, and how many
# scores lie in the threshold's bin. Rows of a multiple of 16 bytes.
_COUNTERS = tl.constexpr(2052)
# Numbers of a row's plan: the threshold's bin, and how many of it are taken.
_PLAN = tl.constexpr(2)
# The first 16 bits of 1/4.
_LEAST_BITS = tl.constexpr(0x3E80)


class _Blocks(NamedTuple):
    """Sizes of a program of the single launch.

    Attributes:
        block: candidates.
        last: the most that the last one chooses from.
        chunks: log-sum-exps that are added up at a time.
    """

    block: int
    last: int
    chunks: int
    warps: int


# Few sizes, since each of them is compiled. Small blocks fill a GPU, large ones leave few rivals.
_SIZES = (_Blocks(1024, 2048, 256, 4), _Blocks(4096, 4096, 1024, 8))


class _Launch(NamedTuple):
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def empty_counters(rows: int, device: torch.device) -> torch.Tensor:
    """``[rows, _COUNTERS]`` int32 of anything, which is to become zeros before a choice."""
    return torch.empty(rows, _COUNTERS.value, dtype=torch.int32, device=device)


def top_k(scores: torch.Tensor, count: int, counters: torch.Tensor | None = None) -> torch.Tensor:
    """See ``hf_kvret_kernels.top_k.top_k``.

    Positions ascend, the missing ones are last; of equal scores the first are taken. ``counters``
    are those of ``empty_counters`` for the rows of scores, made zeros; None for new ones.
    """
    return best_ids(scores.unsqueeze(3), count, counters=counters)


def best_ids(
    scores: torch.Tensor,
    count: int,
    ids: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    tickets: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 indices of the highest, ascending, -1 behind; the first of equals.

    Args:
        scores: ``[B, H, Q, G, n]`` fp32; G heads select together, by the largest of their shares.
        ids: ``[B, H, Q, n]`` int32, to give instead of the indices.
        sums: ``[B, H, Q, G, chunks]`` fp32, contiguous: log-sum-exps of chunks of the scores. Not
            used where G is 1, and the order is that of the scores.
        tickets: ``[B, H, Q]`` int32 of zeros, contiguous, and zeros again afterwards; None for new
            ones.
        counters: see ``top_k``; they take the place of ``tickets``, too.
    """
    sums = None if scores.shape[3] == 1 else sums
    ids = None if ids is None else ids.contiguous()
    warm_up(scores, count, ids, sums)
    batch, heads, queries, group, length = scores.shape
    size = _blocks(length, count)
    if size is None:
        return split_top_k(scores, count, ids, sums, counters)
    assert group == 1 or sums is not None
    lead, device = (batch, heads, queries), scores.device
    out = torch.empty(*lead, count, dtype=torch.int32, device=device)
    if out.numel() == 0:
        return out
    blocks = triton.cdiv(length, size.block)
    # The best of each block, as sortable numbers and as indices.
    orders = torch.empty(*lead, blocks, count, dtype=torch.int32, device=device)
    indices = torch.empty_like(orders)
    if counters is not None:
        tickets = counters
    elif tickets is None:
        tickets = torch.zeros(lead, dtype=torch.int32, device=device)
    written = out, orders, indices, tickets
    launch = _single_launch(scores, ids, sums, written, length, count, size)
    # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
    launch.kernel[(batch * heads * queries, blocks)](*launch.arguments, **launch.constants)
    return out


def split_top_k(
    scores: torch.Tensor,
    count: int,
    ids: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """``best_ids`` in two launches, for any numbers of scores; ``sums`` of any strides."""
    batch, heads, queries, group, length = scores.shape
    assert group == 1 or sums is not None
    lead, device = (batch, heads, queries), scores.device
    out = torch.empty(*lead, count, dtype=torch.int32, device=device)
    if out.numel() == 0:
        return out
    rows, blocks, units = out.numel() // count, triton.cdiv(length, _TOKENS), -(-length // _UNIT)
    if counters is None:
        counters = empty_counters(rows, device).zero_()
    orders = torch.empty(rows, units * _UNIT, dtype=torch.int32, device=device)
    border_places = torch.empty(rows, length, dtype=torch.int32, device=device)
    plan = torch.empty(rows, _PLAN.value, dtype=torch.int32, device=device)
    words = torch.empty(rows, blocks * (_TOKENS // 32), dtype=torch.int32, device=device)
    # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
    grid = (rows, blocks)
    written = out, counters, orders, border_places, plan, words
    chunks = 0 if sums is None else sums.shape[-1]
    for launch in _launches(scores, ids, sums, written, (length, units, chunks, count)):
        launch.kernel[grid](*launch.arguments, **launch.constants)
    return out


def warm_up(
    scores: torch.Tensor,
    count: int,
    ids: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    at_once: bool = True,
    choices: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Compile what choosing among more scores will launch, where somebody asked for it.

    Args:
        scores, count, ids, sums: as of ``best_ids``.
        at_once: whether a single launch chooses among few scores.
        choices: numbers of scores and of those to choose; None: all that are to come.
    """
    growth = dispatch.growth()
    if growth is None:
        return
    if choices is None:
        choices = growth.choices(scores.shape[4], count)
    launches = []
    if at_once:
        written = (torch.int32,) * 4
        launches = [
            _single_launch(scores, ids, sums, written, scores.shape[4], 1, size)
            for size in {_blocks(*choice) for choice in choices}
            if size is not None
        ]
        choices = [choice for choice in choices if _blocks(*choice) is None]
    if choices:
        launches += _launches(scores, ids, sums, (torch.int32,) * 6, (1, 1, 1, 1))
    for launch in launches:
        dispatch.warm_up(*launch)


def _blocks(length: int, count: int) -> _Blocks | None:
    """The sizes with which one launch chooses ``count`` of ``length``; None where none does."""
    for size in _SIZES:
        if count <= size.block and triton.cdiv(length, size.block) * count <= size.last:
            return size
    return None


def _single_launch(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    sums: torch.Tensor | None,
    written: Sequence[Any],
    length: int,
    count: int,
    size: _Blocks,
) -> _Launch:
    """For few scores; ``written`` are out, orders, places and tickets, or their dtypes."""
    return _Launch(
        _best_kernel,
        (
            *(scores, scores if sums is None else sums, scores if ids is None else ids, *written),
            *scores.stride(),
            *(*scores.shape[1:3], length, 0 if sums is None else sums.shape[-1], count),
        ),
        {
            "HAS_IDS": ids is not None,
            "G": scores.shape[3],
            "BLOCK": size.block,
            "LAST": size.last,
            "CHUNKS": size.chunks,
            "num_warps": size.warps,
            "enable_fp_fusion": True,
        },
    )


def _launches(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    sums: torch.Tensor | None,
    written: Sequence[Any],
    numbers: tuple[int, int, int, int],
) -> list[_Launch]:
    """The two of them.

    Args:
        written: what is written, from ``out`` to ``words``, or their dtypes.
        numbers: length, units, chunks and count.
    """
    out, counters, orders, border_places, plan, words = written
    length, units, chunks, count = numbers
    sum_strides = (0, 0, 0, 0) if sums is None else sums.stride()[:4]
    always = {"BLOCK": _TOKENS, "UNIT": _UNIT, "enable_fp_fusion": True}
    return [
        _Launch(
            _count_kernel,
            (
                *(scores, scores if sums is None else sums, orders, counters, plan),
                *scores.stride(),
                *sum_strides,
                *(*scores.shape[1:3], length, units, chunks, count),
            ),
            always | {"G": scores.shape[3], "CHUNKS": _SUMS},
        ),
        _Launch(
            _border_kernel,
            (
                *(orders, border_places, counters, plan, words, out if ids is None else ids, out),
                *(length, units, count),
            ),
            always | {"CHUNK": _CHUNK, "HAS_IDS": ids is not None},
        ),
    ]


@triton.jit
def order_of(scores):
    """int32 that compare as fp32 ``scores`` without NaN do; ``NOTHING`` for -inf."""
    # Integers from here on, so that no unit of the GPU takes a denormal for 0.
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits == _MINUS_ZERO, 0, bits ^ ((bits >> 31) & _GREATEST))
    return tl.where(bits == _MINUS_INF, NOTHING, order)


@triton.jit
def choose(order, count):
    """``(selection, slots, taken)``: the ``count`` highest of ``order [N]``, the first of equals.

    ``selection [N]`` says which, ``slots [N]`` int32 which place each has among them; ``taken`` is
    their number, below ``count`` where there are fewer than that beside ``NOTHING``.
    """
    some = order != NOTHING
    taken = tl.minimum(count, tl.sum(some.to(tl.int32), axis=0))
    threshold = _threshold(order, taken)
    # Counts above the threshold in the upper half and on it in the lower: one prefix sum for both,
    # and neither reaches 2**15.
    pair = tl.where(order > threshold, 65536, (some & (order == threshold)).to(tl.int32))
    of_equal = taken - (tl.sum(pair, axis=0) >> 16)
    ahead = tl.cumsum(pair, axis=0) - pair
    equal_ahead = ahead & 65535
    selection = (pair > 1) | ((pair == 1) & (equal_ahead < of_equal))
    return selection, (ahead >> 16) + tl.minimum(equal_ahead, of_equal), taken


@triton.jit
def _threshold(order, target):
    """The highest integer that ``target`` of ``order [N]`` reach, ``NOTHING`` left out.

    More may reach it where several are equal to it, never fewer. It is found by bisection, which
    ends as soon as the count is right.
    """
    some = order != NOTHING
    low = tl.min(tl.where(some, order, _GREATEST), axis=0)
    high = tl.max(order, axis=0)
    while low < high:
        # The middle, rounded up, of numbers whose sum might overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        at_least = tl.sum((order >= middle).to(tl.int32), axis=0)
        low = tl.where(at_least >= target, middle, low)
        high = tl.where(at_least > target, high, tl.where(at_least == target, middle, middle - 1))
    return low


@triton.jit(do_not_specialize=_CHANGING)
def _best_kernel(
    scores_ptr, sums_ptr, ids_ptr, out_ptr, orders_ptr, places_ptr, tickets_ptr,
    stride_b, stride_h, stride_q, stride_g, stride_n,
    heads, queries, length, chunks, count,
    HAS_IDS: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """A block of the candidates of one selection, scored by G query heads."""
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    indices = block * BLOCK + tl.arange(0, BLOCK)
    inside = indices < length
    scores_ptr += (row // queries // heads) * stride_b + (row // queries % heads) * stride_h
    scores_ptr += (row % queries) * stride_q + indices.to(tl.int64) * stride_n
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for g in range(G):
        score = tl.load(scores_ptr, mask=inside, other=float("-inf"))
        scores_ptr += stride_g
        if G == 1:
            best = score
        else:
            lse = sum_up(sums_ptr + (row * G + g) * chunks, chunks, CHUNKS)
            best = best_share(best, score, lse)
    order = order_of(best)
    selection, slots, taken = choose(order, count)
    start = (row * blocks + block) * count
    tl.store(orders_ptr + start + slots, order, mask=selection)
    tl.store(places_ptr + start + slots, indices, mask=selection)
    own = tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), NOTHING, tl.int32)
    tl.store(orders_ptr + start + own, nothing, mask=(own >= taken) & (own < count))
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == blocks - 1:
        tl.store(tickets_ptr + row, 0)
        start = row * blocks * count
        _choose_among(
            *(orders_ptr + start, places_ptr + start, ids_ptr + row * length),
            *(out_ptr + row * count, blocks * count, count, HAS_IDS, LAST),
        )


@triton.jit
def _choose_among(
    orders_ptr, places_ptr, ids_ptr, out_ptr, number, count,
    HAS_IDS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The best of a row among the ``number`` that its blocks have chosen, LAST at most."""
    rivals = tl.arange(0, LAST)
    inside = rivals < number
    order = tl.load(orders_ptr + rivals, mask=inside, other=NOTHING, cache_modifier=".cg")
    selection, slots, taken = choose(order, count)
    result = tl.load(places_ptr + rivals, mask=selection, other=0, cache_modifier=".cg")
    if HAS_IDS:
        result = tl.load(ids_ptr + result, mask=selection, other=-1)
    tl.store(out_ptr + slots, result, mask=selection)
    empty = tl.full((LAST,), -1, tl.int32)
    tl.store(out_ptr + rivals, empty, mask=(rivals >= taken) & (rivals < count))


@triton.jit
def _bins_of(order):
    """The bin of each of ``order``, an integer of ``order_of``; bins ascend with them."""
    first = order >> 16
    size = first ^ (first >> 31)
    step = tl.minimum(tl.maximum(size - _LEAST_BITS, 0), _HALF - 1)
    return tl.where(first < 0, _HALF - 1 - step, _HALF + step)


@triton.jit
def _load_orders(orders_ptr, row, indices, units, UNIT: tl.constexpr):
    """Of these places of a row; ``NOTHING`` behind its end."""
    orders_ptr += row * units * UNIT + indices
    return tl.load(orders_ptr, mask=indices < units * UNIT, other=NOTHING)


@triton.jit(do_not_specialize=_CHANGING)
def _count_kernel(
    scores_ptr, sums_ptr, orders_ptr, counters_ptr, plan_ptr,
    stride_b, stride_h, stride_q, stride_g, stride_n, sum_stride_b, sum_stride_h, sum_stride_q,
    sum_stride_g,
    heads, queries, length, units, chunks, count,
    G: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Orders of a block of a row, and how many lie in each bin."""
    row = tl.program_id(0).to(tl.int64)
    b, h, q = row // queries // heads, row // queries % heads, row % queries
    indices = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = indices < length
    scores_ptr += b * stride_b + h * stride_h + q * stride_q + indices.to(tl.int64) * stride_n
    sums_ptr += b * sum_stride_b + h * sum_stride_h + q * sum_stride_q
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for _ in range(G):
        score = tl.load(scores_ptr, mask=inside, other=float("-inf"))
        scores_ptr += stride_g
        if G == 1:
            best = score
        else:
            best = best_share(best, score, sum_up(sums_ptr, chunks, CHUNKS))
            sums_ptr += sum_stride_g
    order = order_of(best)
    tl.store(orders_ptr + row * units * UNIT + indices, order, mask=indices < units * UNIT)

    bins = tl.arange(0, _BINS)
    bin_counts = tl.histogram(_bins_of(order), _BINS)
    # Scores that are never taken went to the first bin.
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


@triton.jit(do_not_specialize=_CHANGING)
def _border_kernel(
    orders_ptr, border_ptr, counters_ptr, plan_ptr, words_ptr, ids_ptr, out_ptr, length, units,
    count,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Places of a block in the threshold's bin, and which lie above; the last program chooses."""
    WORDS: tl.constexpr = BLOCK // 32
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    indices = block * BLOCK + tl.arange(0, BLOCK)
    order = _load_orders(orders_ptr, row, indices, units, UNIT)
    plan_ptr += row * _PLAN
    border = tl.load(plan_ptr)
    bins = tl.where(order == NOTHING, -2, _bins_of(order))
    bits = tl.reshape((bins > border).to(tl.int32), (WORDS, 32)) << tl.arange(0, 32)[None, :]
    words_ptr += row * blocks * WORDS
    tl.store(words_ptr + block * WORDS + tl.arange(0, WORDS), tl.sum(bits, axis=1))
    on_border = (bins == border).to(tl.int32)
    number = tl.sum(on_border, axis=0)
    border_ptr += row * length
    counters_ptr += row * _COUNTERS + _BINS
    if number > 0:
        # In the order of arrival, on which nothing depends.
        ahead = tl.atomic_add(counters_ptr + 2, number, sem="relaxed")
        slots = ahead + tl.cumsum(on_border, axis=0) - on_border
        tl.store(border_ptr + slots, indices, mask=on_border > 0)
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel") == blocks - 1:
        number = tl.load(counters_ptr + 2, cache_modifier=".cg")
        orders_ptr += row * units * UNIT
        _settle(orders_ptr, border_ptr, number, tl.load(plan_ptr + 1), words_ptr, length, CHUNK)
        out_ptr += row * count
        _write_places(
            words_ptr, blocks * WORDS, ids_ptr + row * length, out_ptr, count, HAS_IDS, CHUNK
        )


@triton.jit
def _settle(orders_ptr, border_ptr, number, wanted, words_ptr, length, CHUNK: tl.constexpr):
    """Set the bits of the ``wanted`` best of the ``number`` places in the threshold's bin."""
    if number > 0:
        threshold = tl.full((), NOTHING, tl.int32)
        last = length
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
            indices = tl.load(border_ptr + here, mask=inside, other=0, cache_modifier=".cg")
            order = tl.load(orders_ptr + indices, mask=inside, other=NOTHING)
            taken = inside & ((order > threshold) | ((order == threshold) & (indices <= last)))
            tl.atomic_or(words_ptr + (indices >> 5), 1 << (indices & 31), mask=taken, sem="relaxed")
        tl.debug_barrier()


@triton.jit
def _write_places(
    words_ptr, number, ids_ptr, out_ptr, count, HAS_IDS: tl.constexpr, CHUNK: tl.constexpr
):
    """Places of the bits that are set in ``number`` words, or their ids, ascending; -1 behind."""
    behind = tl.zeros((), tl.int32)
    for start in range(0, number, CHUNK):
        here = start + tl.arange(0, CHUNK)
        word = tl.load(words_ptr + here, mask=here < number, other=0, cache_modifier=".cg")
        word = word.to(tl.uint32, bitcast=True)
        # Ones of two bits are added up side by side, then those of four and of eight.
        ones = word - ((word >> 1) & 0x55555555)
        ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
        ones = ((((ones + (ones >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)
        slots = behind + tl.cumsum(ones, axis=0) - ones
        behind += tl.sum(ones, axis=0)
        for bit in range(32):
            taken = ((word >> bit) & 1).to(tl.int32)
            result = here * 32 + bit
            if HAS_IDS:
                result = tl.load(ids_ptr + result, mask=taken > 0, other=-1)
            tl.store(out_ptr + slots, result, mask=taken > 0)
            slots += taken
    fill_empty(out_ptr, behind, count, 0, 1, CHUNK)


@triton.jit
def _highest(
    orders_ptr, border_ptr, number, wanted, threshold, BY_PLACE: tl.constexpr, CHUNK: tl.constexpr
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
            indices = tl.load(border_ptr + here, mask=inside, other=0, cache_modifier=".cg")
            order = tl.load(orders_ptr + indices, mask=inside, other=NOTHING)
            key = order
            if BY_PLACE:
                inside = inside & (order == threshold)
                key = -1 - indices
            key = key.to(tl.uint32, bitcast=True) ^ 0x80000000
            if level > 0:
                inside = inside & ((key >> (32 - 8 * level)) == prefix)
            own = ((key >> (24 - 8 * level)) & 255).to(tl.int32)
            # There are twice the bins: others go to the first of the second half.
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
