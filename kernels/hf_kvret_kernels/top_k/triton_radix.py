"""Triton kernels that choose the highest scores: radix selection, then compaction.

For more scores than one program holds, see ``triton_block``. Scores become unsigned
integers of the same order. Four passes, eight bits each, count how many scores share the digits
that are settled and have each next digit; after the last one the threshold is known to the bit, and
how many scores equal to it are still wanted. Then every block writes its positions behind those of
the blocks before it. Nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_places import fill_empty, sums_before

# Tokens of a program, and sums of blocks that one adds up at a time.
_TOKENS = 1024
_SUMS = 256
# Arguments that follow the length, which changes at every step.
_CHANGING = ("stride_b", "stride_h", "stride_q", "length", "blocks", "count")
_LEVELS = tl.constexpr(4)
# Bits of -inf and of -0.0 as signed integers.
_MINUS_INF = tl.constexpr(-8388608)
_MINUS_ZERO = tl.constexpr(-2147483648)
_SIGN = tl.constexpr(2147483648)
_ALL_BUT_SIGN = tl.constexpr(2147483647)


def radix_top_k(scores: torch.Tensor, count: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """As ``triton.top_k``, for any number of scores; with ``ids`` those instead of the positions.

    ``ids [B, H, Q, n]`` is int32 and contiguous.
    """
    batch, heads, queries, length = scores.shape
    rows, blocks = batch * heads * queries, triton.cdiv(length, _TOKENS)
    shape = (batch, heads, queries, count)
    out = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if out.numel() == 0:
        return out
    levels = _LEVELS.value
    histogram = torch.zeros(rows, levels, 256, dtype=torch.int32, device=scores.device)
    sums = torch.empty(rows, blocks, 2, dtype=torch.int32, device=scores.device)
    grid = (rows * blocks,)
    layout = (*scores.stride(), heads, queries, length, blocks, count)
    for level in range(levels):
        _count_digits_kernel[grid](
            scores,
            histogram,
            *layout,
            LEVEL=level,
            BLOCK=_TOKENS,
            enable_fp_fusion=True,
        )
    _block_sums_kernel[grid](
        scores,
        histogram,
        sums,
        *layout,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    _compact_kernel[grid](
        scores,
        histogram,
        sums,
        out if ids is None else ids,
        out,
        *layout,
        HAS_IDS=ids is not None,
        BLOCK=_TOKENS,
        SUMS=_SUMS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _load_keys(
    scores_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_n,
    heads,
    queries,
    length,
    blocks,
    BLOCK: tl.constexpr,
):
    """This program's row, its tokens, their scores as ordered uint32, and which may be taken."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    scores_ptr += (row // queries // heads) * stride_b
    scores_ptr += (row // queries % heads) * stride_h + (row % queries) * stride_q
    place = scores_ptr + tokens.to(tl.int64) * stride_n
    score = tl.load(place, mask=inside, other=float("-inf"))
    # Integers all the way, so that no unit of the GPU takes a denormal for 0.
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == _MINUS_ZERO, 0, bits)
    order_bits = bits ^ ((bits >> 31) & _ALL_BUT_SIGN)
    key = order_bits.to(tl.uint32, bitcast=True) ^ _SIGN
    return row, tokens, key, bits != _MINUS_INF


@triton.jit
def _settle(histogram_ptr, row, count, LEVELS: tl.constexpr):
    """The leading LEVELS digits of the threshold, and how many with just these are wanted.

    Where a row has fewer scores than ``count`` the digits are 0, which only NaN reaches.
    """
    bins = tl.arange(0, 256)
    digits = tl.zeros((), dtype=tl.uint32)
    target = count
    for level in tl.static_range(LEVELS):
        bin_counts = tl.load(histogram_ptr + (row * _LEVELS + level) * 256 + bins)
        at_least = tl.sum(bin_counts) - tl.cumsum(bin_counts, axis=0) + bin_counts
        digit = tl.max(tl.where(at_least >= target, bins, 0), axis=0)
        target -= tl.sum(tl.where(bins > digit, bin_counts, 0))
        digits = (digits << 8) | digit.to(tl.uint32)
    return digits, target


@triton.jit(do_not_specialize=_CHANGING)
def _count_digits_kernel(
    scores_ptr,
    histogram_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_n,
    heads,
    queries,
    length,
    blocks,
    count,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How often each digit of LEVEL occurs behind the digits that are settled."""
    row, _, key, valid = _load_keys(
        scores_ptr, stride_b, stride_h, stride_q, stride_n, heads, queries, length, blocks, BLOCK
    )
    if LEVEL > 0:
        prefix, _ = _settle(histogram_ptr, row, count, LEVEL)
        valid = valid & ((key >> (32 - 8 * LEVEL)) == prefix)
    digit = ((key >> (24 - 8 * LEVEL)) & 255).to(tl.int32)
    # As many bins again: what is not counted goes to the first of those.
    bins = tl.arange(0, 512)
    bin_counts = tl.histogram(tl.where(valid, digit, 256), 512)
    place = histogram_ptr + (row * _LEVELS + LEVEL) * 256 + bins
    tl.atomic_add(place, bin_counts, mask=(bins < 256) & (bin_counts > 0), sem="relaxed")


@triton.jit(do_not_specialize=_CHANGING)
def _block_sums_kernel(
    scores_ptr,
    histogram_ptr,
    sums_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_n,
    heads,
    queries,
    length,
    blocks,
    count,
    BLOCK: tl.constexpr,
):
    """How many scores of a block lie above the threshold, and on it."""
    row, _, key, valid = _load_keys(
        scores_ptr, stride_b, stride_h, stride_q, stride_n, heads, queries, length, blocks, BLOCK
    )
    threshold, _ = _settle(histogram_ptr, row, count, _LEVELS)
    place = sums_ptr + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, tl.sum((valid & (key > threshold)).to(tl.int32)))
    tl.store(place + 1, tl.sum((valid & (key == threshold)).to(tl.int32)))


@triton.jit(do_not_specialize=_CHANGING)
def _compact_kernel(
    scores_ptr,
    histogram_ptr,
    sums_ptr,
    ids_ptr,
    out_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_n,
    heads,
    queries,
    length,
    blocks,
    count,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Positions of the taken tokens of a block, behind those of the blocks before it."""
    row, tokens, key, valid = _load_keys(
        scores_ptr, stride_b, stride_h, stride_q, stride_n, heads, queries, length, blocks, BLOCK
    )
    threshold, of_equal = _settle(histogram_ptr, row, count, _LEVELS)
    block = tl.program_id(0) % blocks
    above_before, equal_before = sums_before(sums_ptr + row * blocks * 2, block, SUMS)

    above = valid & (key > threshold)
    equal = valid & (key == threshold)
    above_ahead = above_before + tl.cumsum(above.to(tl.int32), axis=0) - above.to(tl.int32)
    equal_ahead = equal_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal.to(tl.int32)
    selection = above | (equal & (equal_ahead < of_equal))
    slot = above_ahead + tl.minimum(equal_ahead, of_equal)
    result = tokens
    if HAS_IDS:
        result = tl.load(ids_ptr + row * length + tokens, mask=selection, other=-1)
    out_ptr += row * count
    tl.store(out_ptr + slot, result, mask=selection)
    # The first level counts every score that may be taken.
    bin_counts = tl.load(histogram_ptr + row * _LEVELS * 256 + tl.arange(0, 256))
    fill_empty(out_ptr, tl.sum(bin_counts, axis=0), count, block, blocks, BLOCK)
