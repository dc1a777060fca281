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

from hf_kvret_kernels._triton_log_sums import finite_base, log_total
from hf_kvret_kernels._triton_masks import mask_bytes, mask_strides
from hf_kvret_kernels._triton_shared import capped_scores, score_factors
from hf_kvret_kernels.relevance.triton_shares import write_best_shares

# Numbers of a tile of proxies, within a fewest and a most of tokens (fewer than 32 leave warps
# without a product of their own), and the rows of queries that meet it at a time, the fewest of a
# tensor core's product. Compiled for sm80, rows of 256 numbers take 98 KiB of shared memory in fp32
# and 66 else, common GPUs lend 99; no width spills registers.
_TILE = 4096
_FEWEST_TOKENS = 32
_MOST_TOKENS = 128
_READERS = 16
# Block sums that a program adds up at a time.
_SUMS = 512
# Arguments that follow the length, which changes at every step, or the number of drafts.
_CHANGING = ("length", "blocks", "readers", "rows_stride_b", "rows_stride_f", "valid_stride_b")


def relevance(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    valid: torch.Tensor | None,
    offset: torch.Tensor | None,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.relevance``."""
    batch, query_heads, queries, rank = query.shape
    sets, length = rows.shape[1:3]
    shape, device = (batch, query_heads, queries, length), query.device
    scores = torch.empty(shape, dtype=torch.float32, device=device)
    if scores.numel() == 0:
        return scores.new_empty(batch, heads, queries, length)
    readers = query_heads // sets * queries
    block_r = max(16, triton.next_power_of_2(rank))
    block_n = max(_FEWEST_TOKENS, min(_MOST_TOKENS, _TILE // block_r))
    blocks = triton.cdiv(length, block_n)
    is_grouped = heads < query_heads
    # A pointer that the kernel ignores where every head selects by itself.
    sums = scores.new_empty(batch * query_heads * queries, blocks) if is_grouped else scores
    _scores_kernel[(batch * sets * blocks,)](
        query.contiguous(),
        rows,
        mask_bytes(valid, rows),
        query if offset is None else offset,
        scores,
        sums,
        length,
        blocks,
        readers,
        sets,
        *rows.stride()[:2],
        *mask_strides(valid),
        *score_factors(1.0, softcap),
        SOFTCAP=softcap is not None,
        HAS_VALID=valid is not None,
        HAS_OFFSET=offset is not None,
        GROUPED=is_grouped,
        EXACT_IN_TF32=rows.dtype != torch.float32,
        ALIGN=_alignment_bytes(rows),
        R=rank,
        BLOCK_R=block_r,
        BLOCK_M=_READERS,
        BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=True,
    )
    if not is_grouped:
        return scores
    lse = scores.new_empty(len(sums), 1)
    _total_kernel[(len(sums),)](
        sums,
        lse,
        blocks,
        BLOCK=_SUMS,
        enable_fp_fusion=True,
    )
    best = scores.new_empty(batch, heads, queries, length)
    write_best_shares(scores, lse, best, queries, query_heads // heads, 1)
    return best


def _alignment_bytes(rows: torch.Tensor) -> int:
    """What the address of every row is a multiple of; at most 16."""
    steps = (rows.shape[3], *rows.stride()[:2])
    return math.gcd(16, rows.data_ptr(), *(step * rows.element_size() for step in steps))


@triton.jit
def _dots(query, proxies, EXACT_IN_TF32: tl.constexpr):
    """``[M, N]`` inner products of fp32 ``query [M, R]`` and ``proxies [N, R]``, as good as fp32.

    A cast of the query to the proxies' dtype would cost three digits, and fp32 without tensor
    cores would take longer than the proxies' way from memory. Proxies of 8 and 16 bits are
    numbers of tf32 already, so two dots do, with the query's leading bits and with the rest; those
    of 32 bits are split as well.
    """
    columns = tl.trans(proxies.to(tl.float32))
    if EXACT_IN_TF32:
        high_part = (query.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        dots = tl.dot(query - high_part, columns, input_precision="tf32")
        dots = tl.dot(high_part, columns, dots, input_precision="tf32")
    else:
        dots = tl.dot(query, columns, input_precision="tf32x3")
    return dots


@triton.jit(do_not_specialize=_CHANGING)
def _scores_kernel(
    query_ptr,
    rows_ptr,
    valid_ptr,
    offset_ptr,
    scores_ptr,
    sums_ptr,
    length,
    blocks,
    readers,
    sets,
    rows_stride_b,
    rows_stride_f,
    valid_stride_b,
    valid_stride_n,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT_IN_TF32: tl.constexpr,
    ALIGN: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of tokens of one set; its readers are the queries of its query heads, in order."""
    block = tl.program_id(0) % blocks
    index = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_R)
    inside = tokens < length
    token_mask = inside
    if HAS_VALID:
        mask_ptr = valid_ptr + (index // sets) * valid_stride_b + tokens * valid_stride_n
        token_mask = token_mask & (tl.load(mask_ptr, mask=inside, other=0) != 0)
    rows_ptr += (index // sets) * rows_stride_b + (index % sets) * rows_stride_f
    rows_ptr = tl.multiple_of(rows_ptr, ALIGN)
    mask = inside[:, None] & (columns < R)[None, :]
    proxies = tl.load(rows_ptr + tokens[:, None] * R + columns[None, :], mask=mask, other=0)
    for start in range(0, readers, BLOCK_M):
        readers_here = start + tl.arange(0, BLOCK_M)
        reader_mask = readers_here < readers
        target = index * readers + readers_here
        query = tl.load(
            query_ptr + target[:, None] * R + columns[None, :],
            mask=reader_mask[:, None] & (columns < R)[None, :],
            other=0.0,
        )
        dots = _dots(query, proxies, EXACT_IN_TF32)
        if HAS_OFFSET:
            dots += tl.load(offset_ptr + target, mask=reader_mask, other=0.0)[:, None]
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(token_mask[None, :], scores, float("-inf"))
        tl.store(
            scores_ptr + target[:, None] * length + tokens[None, :],
            scores,
            mask=reader_mask[:, None] & inside[None, :],
        )
        if GROUPED:
            base = finite_base(tl.max(scores, 1))
            lse = log_total(base, tl.sum(tl.exp(scores - base[:, None]), 1))
            tl.store(sums_ptr + target * blocks + block, lse, mask=reader_mask)


@triton.jit(do_not_specialize=["blocks"])
def _total_kernel(sums_ptr, lse_ptr, blocks, BLOCK: tl.constexpr):
    """The log-sum-exp of one query over all blocks."""
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, blocks, BLOCK):
        places = start + tl.arange(0, BLOCK)
        part = tl.load(sums_ptr + row * blocks + places, mask=places < blocks, other=float("-inf"))
        peaks = tl.maximum(peaks, part)
    base = finite_base(tl.max(peaks, 0))
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, blocks, BLOCK):
        places = start + tl.arange(0, BLOCK)
        part = tl.load(sums_ptr + row * blocks + places, mask=places < blocks, other=float("-inf"))
        totals += tl.exp(part - base)
    tl.store(lse_ptr + row, log_total(base, tl.sum(totals, 0)))
