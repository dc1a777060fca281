"""Triton kernels that score all tokens by their proxies, and compare the heads of a group.

The first reads each block of proxies once, for all queries and query heads that look at it. Where
several query heads select together it also leaves the block's log-sum-exp; the second sums these
up over the blocks. The best share of a group's heads is ``relevance``'s.
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
    log_total,
    mask_bytes,
    mask_layout,
    score_factors,
    sum_up,
)
from hf_kvret_kernels.proxy import ProxyCall
from hf_kvret_kernels.relevance.triton import write_best_shares
from hf_kvret_kernels.top_k.triton import split_top_k, top_k, warm_up

# Numbers of a tile of proxies of four bytes and of fewer, within a fewest and a most of tokens
# (fewer than 32 leave warps without a product of their own), and the most readers that meet it at a
# time. Compiled for sm80, programs take at most 72 KiB of shared memory in fp32 and 48 else, common
# GPUs lend 99; no width spills registers.
_TILE = 4096
_NARROW_TILE = 8192
_FEWEST_TOKENS = 32
_MOST_TOKENS = 256
_READERS = 8
# The fewest columns of a product of tensor cores.
_COLUMNS = 8
# Numbers that a store takes at once: rows of scores begin at multiples of so many.
_WIDE = 4
# Tokens whose log-sum-exp is left as one number.
_CHUNK = 128
# Block sums that a program adds up at a time.
_SUMS = 512
# By the proxies' dtype: copies of a query whose parts add up to it, and the bits that a part's
# numbers have, sign and exponent among them. Proxies of fp32 leave this to the dot.
_COPIES = {torch.bfloat16: (4, 16), torch.int8: (4, 16), torch.float16: (2, 19)}
# Arguments that follow the length, which changes at every step, or the number of drafts.
_CHANGING = ("length", "chunks", "readers", "rows_stride_b", "rows_stride_f", "valid_stride_b")


def relevance(call: ProxyCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.relevance``."""
    scores, lse = _scores(call)
    if lse is None:
        return scores
    batch, query_heads, queries, length = scores.shape
    best = scores.new_empty(batch, call.heads, queries, length)
    if best.numel():
        group = query_heads // call.heads
        write_best_shares(scores, lse, best, queries, group, 1, scores.stride(2))
    return best


def top_indices(call: ProxyCall, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.top_indices``."""
    scores, lse = _scores(call)
    if lse is None:
        return top_k(scores, count)
    scores, sums = (one.unflatten(1, (call.heads, -1)).transpose(2, 3) for one in (scores, lse))
    warm_up(scores, count, sums=sums, most_chunks=1, at_once=False)
    return split_top_k(scores, count, sums=sums)


def _scores(call: ProxyCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(scores [B, Hq, Q, n], lse [B, Hq, Q, 1])`` fp32; None where every head selects alone.

    Rows of scores are a multiple of ``_WIDE`` numbers apart.
    """
    query, rows, heads, valid, offset, softcap = call
    batch, query_heads, queries, rank = query.shape
    sets, length = rows.shape[1:3]
    is_grouped = heads < query_heads
    padded_len = triton.cdiv(length, _WIDE) * _WIDE
    scores = query.new_empty(batch, query_heads, queries, padded_len)[..., :length]
    lse = scores.new_empty(batch, query_heads, queries, 1) if is_grouped else None
    if scores.numel() == 0:
        return scores, lse
    readers = query_heads // sets * queries
    copies, bits = _COPIES.get(rows.dtype, (1, 32))
    tile = _TILE if rows.element_size() == 4 else _NARROW_TILE
    block_r = max(16, triton.next_power_of_2(rank))
    block_n = max(_FEWEST_TOKENS, min(_MOST_TOKENS, tile // block_r))
    chunk = min(_CHUNK, block_n)
    chunks = triton.cdiv(length, chunk)
    # A pointer that the kernel ignores where every head selects by itself.
    sums = scores.new_empty(batch * query_heads * queries, chunks) if is_grouped else scores
    _scores_kernel[(triton.cdiv(length, block_n), sets, batch)](
        query.contiguous(),
        rows,
        mask_bytes(valid, rows),
        query if offset is None else offset,
        scores,
        sums,
        length,
        chunks,
        readers,
        *rows.stride()[:2],
        *mask_layout(valid),
        *score_factors(1.0, softcap),
        SOFTCAP=softcap is not None,
        HAS_VALID=valid is not None,
        HAS_OFFSET=offset is not None,
        GROUPED=is_grouped,
        DOT_DTYPE=dot_dtype(torch.bfloat16) if bits == 16 else tl.float32,
        COPIES=copies,
        BITS=bits,
        ALIGN=_alignment_bytes(rows),
        UNIT=_WIDE,
        R=rank,
        CHUNK=chunk,
        BLOCK_R=block_r,
        BLOCK_M=max(_COLUMNS // copies, min(_READERS, triton.next_power_of_2(readers))),
        BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=True,
    )
    if lse is not None:
        _total_kernel[(len(sums),)](sums, lse, chunks, BLOCK=_SUMS, enable_fp_fusion=True)
    return scores, lse


def _alignment_bytes(rows: torch.Tensor) -> int:
    """What the address of every row is a multiple of; at most 16."""
    steps = (rows.shape[3], *rows.stride()[:2])
    return math.gcd(16, rows.data_ptr(), *(step * rows.element_size() for step in steps))


@triton.jit
def _top_bits(x, BITS: tl.constexpr):
    """fp32 ``x`` cut off after its first BITS, sign and exponent among them."""
    return (x.to(tl.int32, bitcast=True) & (-1 << (32 - BITS))).to(tl.float32, bitcast=True)


@triton.jit
def _dots(
    proxies, query,
    DOT_DTYPE: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``[M, N]`` inner products of ``proxies [N, R]`` and fp32 ``query``, as good as fp32.

    A cast of the query to the proxies' dtype would cost digits, and fp32 without tensor cores would
    take longer than the proxies' way from memory. So each of the M queries is a column several
    times, ``query [R, M * COPIES]``, of which every one takes a part, in numbers that tensor cores
    take as they are: three of bf16 for proxies of bf16 or bytes and a fourth of nothing, two of
    tf32 for fp16. One product has tokens for rows, as tensor cores take 64 of these but as few as 8
    columns, and its columns are added up. Proxies of fp32 are split as well.
    """
    if COPIES == 1:
        dots = tl.dot(proxies, query, input_precision="tf32x3")
    else:
        part = (tl.arange(0, BLOCK_M * COPIES) % COPIES)[None, :]
        high = _top_bits(query, BITS)
        parts = tl.where(part == 0, high, query - high)
        if COPIES == 4:
            middle = _top_bits(query - high, BITS)
            parts = tl.where(part == 1, middle, parts)
            parts = tl.where(part == 2, query - high - middle, parts)
            parts = tl.where(part == 3, 0.0, parts)
        dots = tl.dot(proxies.to(DOT_DTYPE), parts.to(DOT_DTYPE), input_precision="tf32")
        dots = tl.sum(tl.reshape(dots, (BLOCK_N, BLOCK_M, COPIES)), axis=2)
    return tl.trans(dots)


@triton.jit(do_not_specialize=_CHANGING)
def _scores_kernel(
    query_ptr, rows_ptr, valid_ptr, offset_ptr, scores_ptr, sums_ptr, length, chunks, readers,
    rows_stride_b, rows_stride_f, valid_stride_b, valid_stride_n,
    VALID_UNIT: tl.constexpr,
    inner, outer,
    SOFTCAP: tl.constexpr, HAS_VALID: tl.constexpr, HAS_OFFSET: tl.constexpr, GROUPED: tl.constexpr,
    DOT_DTYPE: tl.constexpr, COPIES: tl.constexpr, BITS: tl.constexpr, ALIGN: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one set; its readers are the queries of its query heads, in order.

    Rows of scores are a multiple of UNIT numbers apart; what lies between two is written, too, so
    that a store takes so many numbers at once.
    """
    HERE: tl.constexpr = BLOCK_N // CHUNK
    score_stride = tl.cdiv(length, UNIT) * UNIT
    first = tl.program_id(0) * BLOCK_N
    batch = tl.program_id(2).to(tl.int64)
    index = batch * tl.num_programs(1) + tl.program_id(1)
    indices = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_R)
    inside = indices < length - first
    token_mask = inside
    if HAS_VALID:
        mask_ptr = valid_ptr + batch * valid_stride_b * VALID_UNIT
        mask_ptr += first.to(tl.int64) * valid_stride_n + indices.to(tl.int64) * valid_stride_n
        end = tl.cdiv(length, VALID_UNIT) * VALID_UNIT
        valid = tl.load(mask_ptr, mask=indices < end - first, other=0)
        token_mask = token_mask & (valid != 0)
    rows_ptr += batch * rows_stride_b + tl.program_id(1).to(tl.int64) * rows_stride_f
    rows_ptr = tl.multiple_of(rows_ptr + first.to(tl.int64) * R, ALIGN)
    mask = inside[:, None] & (columns < R)[None, :]
    proxies = tl.load(rows_ptr + (indices[:, None] * R + columns[None, :]), mask=mask, other=0)
    for start in tl.range(0, readers, BLOCK_M, num_stages=1):
        readers_here = start + tl.arange(0, BLOCK_M)
        reader_mask = readers_here < readers
        target = index * readers + readers_here
        copied = start + tl.arange(0, BLOCK_M * COPIES) // COPIES
        query = tl.load(
            query_ptr + (index * readers + copied)[None, :] * R + columns[:, None],
            mask=(copied < readers)[None, :] & (columns < R)[:, None],
            other=0.0,
        )
        dots = _dots(proxies, query, DOT_DTYPE, COPIES, BITS, BLOCK_M, BLOCK_N)
        if HAS_OFFSET:
            dots += tl.load(offset_ptr + target, mask=reader_mask, other=0.0)[:, None]
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        tl.store(
            scores_ptr + first + target[:, None] * score_stride + indices[None, :],
            scores,
            mask=reader_mask[:, None] & (indices < score_stride - first)[None, :],
        )
        if GROUPED:
            parts = tl.reshape(scores, (BLOCK_M, HERE, CHUNK))
            base = finite_base(tl.max(parts, 2))
            lse = log_total(base, tl.sum(tl.exp(parts - base[:, :, None]), 2))
            chunks_here = tl.program_id(0) * HERE + tl.arange(0, HERE)
            tl.store(
                sums_ptr + target[:, None] * chunks + chunks_here[None, :],
                lse,
                mask=reader_mask[:, None] & (chunks_here < chunks)[None, :],
            )


@triton.jit(do_not_specialize=["blocks"])
def _total_kernel(sums_ptr, lse_ptr, blocks, BLOCK: tl.constexpr):
    """The log-sum-exp of one query over all blocks."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(lse_ptr + row, sum_up(sums_ptr + row * blocks, blocks, BLOCK))
