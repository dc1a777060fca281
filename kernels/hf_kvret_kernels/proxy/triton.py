"""Triton kernel that scores all tokens by their proxies.

A program goes through a chunk of the tokens of one set, for some of the queries that look at it.
Where queries are to be projected it does so first. Where several query heads select together it
also leaves the log-sum-exp of its chunk: few enough of them that whoever compares the heads adds
them up. The best share of a group's heads is ``relevance``'s.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    capped_scores,
    dot_dtype,
    finite_base,
    load_mask,
    log_total,
    mask_bytes,
    mask_layout,
    score_factors,
    split_plan,
)
from hf_kvret_kernels.proxy import ProxyCall
from hf_kvret_kernels.relevance.triton import write_best_shares
from hf_kvret_kernels.top_k.triton import empty_counters, split_top_k, top_k, warm_up

# Numbers of a tile of proxies of four bytes and of fewer, within a fewest and a most of tokens
# (fewer than 32 leave warps without a product of their own), and the most readers that meet it.
# Compiled for sm80 and sm90, programs take at most 49 KiB of shared memory, common GPUs lend 99. No
# width spills registers but of fp32 on sm90, if it is wide and queries are projected.
_TILE = 4096
_NARROW_TILE = 8192
_FEWEST_TOKENS = 32
_MOST_TOKENS = 128
_READERS = 8
# The fewest columns of a product of tensor cores.
_COLUMNS = 8
# Numbers of a query that are projected at a time.
_PART = 16
# Numbers that a store takes at once: rows of scores begin at multiples of so many.
_WIDE = 4
# Programs for each multiprocessor to aim at, and the most chunks, which a program adds up at once.
_WAVES = 16
_CHUNKS = 256
# Numbers that are made zeros at a time.
_ZEROS = tl.constexpr(1024)
# Copies of a query, whose parts add up to it, and bits of a part's numbers go by the proxies'
# dtype. Proxies of fp32 leave this to the dot.
_COPIES = {torch.bfloat16: (4, 16), torch.int8: (4, 8), torch.float16: (2, 19)}
# Arguments that follow the length, which changes at every step, or the number of drafts.
_CHANGING = (
    *("length", "chunk_len", "readers", "zeros"),
    *("rows_stride_b", "rows_stride_f", "valid_stride_b"),
)


def relevance(call: ProxyCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.relevance``."""
    scores, sums = _scores(call)
    if sums is None:
        return scores
    batch, query_heads, queries, length = scores.shape
    best = scores.new_empty(batch, call.heads, queries, length)
    if best.numel():
        group = query_heads // call.heads
        write_best_shares(scores, sums, best, queries, group, _CHUNKS, scores.stride(2))
    return best


def top_indices(call: ProxyCall, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.top_indices``."""
    batch, _, queries, _ = call.query.shape
    counters = empty_counters(batch * call.heads * queries, call.query.device)
    scores, sums = _scores(call, counters)
    if sums is None:
        return top_k(scores, count, counters)
    scores, sums = (one.unflatten(1, (call.heads, -1)).transpose(2, 3) for one in (scores, sums))
    warm_up(scores, count, sums=sums, at_once=False)
    return split_top_k(scores, count, sums=sums, counters=counters)


def _scores(
    call: ProxyCall, zeroed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(scores [B, Hq, Q, n], sums [B, Hq, Q, chunks])`` fp32; None where heads select alone.

    Rows of scores are a multiple of ``_WIDE`` numbers apart. ``zeroed``, int32, is made zeros.
    """
    query, rows, projection, kept = call.query.contiguous(), call.rows, call.projection, call.kept
    batch, query_heads, queries, dim = query.shape
    sets, length, rank = rows.shape[1:]
    is_grouped = call.heads < query_heads
    padded_len = triton.cdiv(length, _WIDE) * _WIDE
    scores = torch.empty(
        batch, query_heads, queries, padded_len, dtype=torch.float32, device=query.device
    )[..., :length]
    if scores.numel() == 0:
        return scores, scores if is_grouped else None
    readers = query_heads // sets * queries
    copies, bits = _COPIES.get(rows.dtype, (1, 32))
    tile = _TILE if rows.element_size() == 4 else _NARROW_TILE
    block_r = max(32 if bits == 8 else 16, triton.next_power_of_2(rank))  # Products take no fewer.
    block_n = max(_FEWEST_TOKENS, min(_MOST_TOKENS, tile // block_r))
    block_m = max(_COLUMNS // copies, min(_READERS, triton.next_power_of_2(readers)))
    tiles = triton.cdiv(readers, block_m)
    chunks, chunk_len = split_plan(
        length, block_n, batch * sets * tiles, query.device, waves=_WAVES, most=_CHUNKS
    )
    sums = scores.new_empty(batch, query_heads, queries, chunks) if is_grouped else None
    maps, steps, mean = (None, None, None) if projection is None else projection
    # The kernel ignores these pointers.
    unread = scores
    _scores_kernel[(chunks * tiles, sets, batch)](
        query,
        *(unread if each is None else each.contiguous() for each in (maps, steps, mean)),
        *((query, unread) if kept is None else kept),
        rows,
        mask_bytes(call.valid, rows),
        scores,
        unread if sums is None else sums,
        unread if zeroed is None else zeroed,
        *(length, chunk_len, readers),
        0 if zeroed is None else zeroed.numel(),
        1 if kept is None else kept.rows.shape[2],
        *rows.stride()[:2],
        *mask_layout(call.valid),
        *score_factors(call.scale, call.softcap),
        SOFTCAP=call.softcap is not None,
        HAS_VALID=call.valid is not None,
        GROUPED=is_grouped,
        PROJECTS=projection is not None,
        HAS_STEPS=steps is not None,
        HAS_MEAN=mean is not None,
        KEEPS=kept is not None,
        DOT_DTYPE={8: tl.int8, 16: dot_dtype(torch.bfloat16)}.get(bits, tl.float32),
        COPIES=copies,
        BITS=bits,
        ALIGN=_alignment_bytes(rows),
        UNIT=_WIDE,
        R=rank,
        DIM=dim,
        PART=_PART,
        BLOCK_R=block_r,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return scores, sums


def _alignment_bytes(rows: torch.Tensor) -> int:
    """What the address of every row is a multiple of; at most 16."""
    steps = (rows.shape[3], *rows.stride()[:2])
    return math.gcd(16, rows.data_ptr(), *(step * rows.element_size() for step in steps))


@triton.jit
def _top_bits(x, BITS: tl.constexpr):
    """fp32 ``x`` cut off after its first BITS, sign and exponent among them."""
    return (x.to(tl.int32, bitcast=True) & (-1 << (32 - BITS))).to(tl.float32, bitcast=True)


@triton.jit
def _split(query, DOT_DTYPE: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr):
    """``(parts, units [M])`` of fp32 ``query [R, M]``, where each column stands COPIES times.

    A cast of the query to the proxies' dtype would cost digits, and fp32 without tensor cores would
    take longer than the proxies' way from memory. So every column of a query takes a part of it, in
    numbers that tensor cores take as they are: three of bf16 for proxies of bf16 and a fourth of
    nothing, two of tf32 for fp16, four digits for bytes, to be multiplied with ``units``. Proxies
    of fp32 are split as well, by the dot.
    """
    part = (tl.arange(0, query.shape[1]) % COPIES)[None, :]
    unit = tl.maximum(tl.max(tl.abs(query), axis=0), 1e-28)[None, :] / (1 << 30)
    parts = query
    if BITS == 8:
        # Digits from -128 to 127 are bytes of a sum with 128 in each but the last.
        byte = ((query / unit).to(tl.int32) + 0x808080) >> (8 * part)
        parts = tl.where(part == COPIES - 1, byte, (byte & 255) - 128)
    elif COPIES > 1:
        high = _top_bits(query, BITS)
        parts = tl.where(part == 0, high, query - high)
        if COPIES == 4:
            middle = _top_bits(query - high, BITS)
            rest = tl.where(part == 1, middle, tl.where(part == 2, parts - middle, 0.0))
            parts = tl.where(part == 0, high, rest)
    return parts.to(DOT_DTYPE), tl.reshape(unit * (1 << (8 * part)), (query.shape[1],))


@triton.jit
def _dots(proxies, parts, units, COPIES: tl.constexpr, BITS: tl.constexpr):
    """``[M, N]`` inner products of ``proxies [N, R]`` and a query in ``parts``, as good as fp32.

    One product has tokens for rows, as tensor cores take 64 of these but as few as 8 columns, and
    the columns of a query are added up.
    """
    if COPIES == 1:
        dots = tl.dot(proxies, parts, input_precision="tf32x3")
    else:
        dots = tl.dot(proxies.to(parts.dtype), parts, input_precision="tf32")
        if BITS == 8:
            dots = dots.to(tl.float32) * units[None, :]
        dots = tl.sum(tl.reshape(dots, (proxies.shape[0], units.shape[0] // COPIES, COPIES)), 2)
    return tl.trans(dots)


@triton.jit
def _project(
    queries, query_mask, maps_ptr, steps_ptr, mean_ptr,
    R: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_STEPS: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """``(proxies [BLOCK_R, N], offset [N])`` of the queries at ``queries [N]``, see ``Projection``.

    The other pointers are to those of their set.
    """
    columns = tl.arange(0, BLOCK_R)
    proxies = tl.zeros((BLOCK_R, queries.shape[0]), tl.float32)
    offset = tl.zeros((queries.shape[0],), tl.float32)
    for first in tl.range(0, DIM, PART, num_stages=1):
        numbers = first + tl.arange(0, PART)
        mask = (numbers < DIM)[:, None] & query_mask[None, :]
        query = tl.load(queries[None, :] + numbers[:, None], mask=mask, other=0.0).to(tl.float32)
        maps = tl.load(
            maps_ptr + numbers[None, :] * R + columns[:, None],
            mask=(numbers < DIM)[None, :] & (columns < R)[:, None],
            other=0.0,
        )
        proxies = tl.dot(maps, query, proxies, input_precision="tf32x3")
        if HAS_MEAN:
            mean = tl.load(mean_ptr + numbers, mask=numbers < DIM, other=0.0)
            offset += tl.sum(query * mean[:, None], axis=0)
    if HAS_STEPS:
        proxies *= tl.load(steps_ptr + columns, mask=columns < R, other=0.0)[:, None]
    return proxies, offset


@triton.jit
def _keep(
    query_ptr, kept_ptr, next_ptr, room, target, mask, programs,
    DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write the queries ``target [M]`` down, and count them where all ``programs`` have done so."""
    at = tl.load(next_ptr)
    for first in range(0, DIM, PART):
        numbers = (first + tl.arange(0, PART))[None, :]
        inside = mask[:, None] & (numbers < DIM)
        query = tl.load(query_ptr + target[:, None] * DIM + numbers, mask=inside)
        tl.store(kept_ptr + (target[:, None] * room + at) * DIM + numbers, query, mask=inside)
    # All threads of all programs have read where to write.
    tl.debug_barrier()
    if tl.atomic_add(next_ptr + 1, 1, sem="acq_rel") == programs - 1:
        tl.store(next_ptr, at + 1)
        tl.store(next_ptr + 1, 0)


@triton.jit(do_not_specialize=_CHANGING)
def _scores_kernel(
    query_ptr, maps_ptr, steps_ptr, mean_ptr, kept_ptr, next_ptr, rows_ptr, valid_ptr, scores_ptr,
    sums_ptr, zeros_ptr, length, chunk_len, readers, zeros, room,
    rows_stride_b, rows_stride_f, valid_stride_b, valid_stride_n,
    VALID_UNIT: tl.constexpr,
    inner, outer,
    SOFTCAP: tl.constexpr, HAS_VALID: tl.constexpr, GROUPED: tl.constexpr, PROJECTS: tl.constexpr,
    HAS_STEPS: tl.constexpr, HAS_MEAN: tl.constexpr, KEEPS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    COPIES: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr, UNIT: tl.constexpr,
    R: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A chunk of the tokens of one set; its readers are the queries of its query heads, in order.

    Rows of scores are a multiple of UNIT numbers apart; what lies between two is written, too, so
    that a store takes so many numbers at once.
    """
    score_stride = tl.cdiv(length, UNIT) * UNIT
    tiles = tl.cdiv(readers, BLOCK_M)
    chunk, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M
    batch = tl.program_id(2).to(tl.int64)
    index = batch * tl.num_programs(1) + tl.program_id(1)
    readers_here = first + tl.arange(0, BLOCK_M)
    reader_mask = readers_here < readers
    target = index * readers + readers_here

    # Later kernels count in them.
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = index.to(tl.int32) * tl.num_programs(0) + tl.program_id(0)
    for block in range(program, tl.cdiv(zeros, _ZEROS), programs):
        numbers = block * _ZEROS + tl.arange(0, _ZEROS)
        tl.store(zeros_ptr + numbers, tl.zeros((_ZEROS,), tl.int32), mask=numbers < zeros)
    if KEEPS and chunk == 0:
        writers = tiles * tl.num_programs(1) * tl.num_programs(2)
        _keep(query_ptr, kept_ptr, next_ptr, room, target, reader_mask, writers, DIM, PART)

    columns = tl.arange(0, BLOCK_R)
    copied = first + tl.arange(0, BLOCK_M * COPIES) // COPIES
    queries = query_ptr + (index * readers + copied) * DIM
    if PROJECTS:
        maps = maps_ptr + index * (DIM * R)
        query, offset = _project(
            queries, copied < readers, maps, steps_ptr + index * R, mean_ptr + index * DIM,
            R, DIM, PART, BLOCK_R, HAS_STEPS, HAS_MEAN,
        )  # fmt: skip
        offset = tl.max(tl.reshape(offset, (BLOCK_M, COPIES)), axis=1)
    else:
        query_mask = (copied < readers)[None, :] & (columns < R)[:, None]
        query = tl.load(queries[None, :] + columns[:, None], mask=query_mask, other=0.0)
        query = query.to(tl.float32)
    parts, units = _split(query, DOT_DTYPE, COPIES, BITS)

    begin = chunk * chunk_len
    rows_ptr += batch * rows_stride_b + tl.program_id(1).to(tl.int64) * rows_stride_f
    scores_ptr += target[:, None] * score_stride
    indices = tl.arange(0, BLOCK_N)
    peaks = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    totals = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + chunk_len, length), BLOCK_N, num_stages=2):
        inside = indices < length - start
        token_mask = inside
        if HAS_VALID:
            token_mask = load_mask(
                valid_ptr, batch, start + indices, length, valid_stride_b, valid_stride_n,
                VALID_UNIT,
            )  # fmt: skip
        start_ptr = tl.multiple_of(rows_ptr + tl.cast(start, tl.int64) * R, ALIGN)
        mask = inside[:, None] & (columns < R)[None, :]
        proxies = tl.load(start_ptr + (indices[:, None] * R + columns[None, :]), mask=mask, other=0)
        dots = _dots(proxies, parts, units, COPIES, BITS)
        if HAS_MEAN:
            dots += offset[:, None]
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        tl.store(
            scores_ptr + start + indices[None, :],
            scores,
            mask=reader_mask[:, None] & (indices < score_stride - start)[None, :],
        )
        if GROUPED:
            peak = tl.maximum(peaks, scores)
            base = finite_base(peak)
            totals = totals * tl.exp(peaks - base) + tl.exp(scores - base)
            peaks = peak
    if GROUPED:
        base = finite_base(tl.max(peaks, 1))
        lse = log_total(base, tl.sum(totals * tl.exp(peaks - base[:, None]), 1))
        chunks = tl.num_programs(0) // tiles
        tl.store(sums_ptr + target * chunks + chunk, lse, mask=reader_mask)
