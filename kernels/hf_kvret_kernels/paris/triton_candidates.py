"""Triton kernels that choose the highest scores: block sums, then compaction behind them."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_places import fill_empty, sums_before
from hf_kvret_kernels.paris.codes import EXCLUDED

_EXCLUDED = tl.constexpr(EXCLUDED)
# Tokens of a program, and sums of blocks that one adds up at a time.
_TOKENS = 1024
_SUMS = 256


def candidates(scores: torch.Tensor, histogram: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, queries, length = scores.shape
    # An empty row has a block too, which fills its slots.
    rows, blocks = batch * heads * queries, max(1, triton.cdiv(length, _TOKENS))
    shape = (batch, heads, queries, count)
    ids = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if ids.numel() == 0:
        return ids
    if length and scores.stride(3) != 1:
        scores = scores.contiguous()
    histogram = histogram.contiguous()
    sums = torch.empty(rows, blocks, 2, dtype=torch.int32, device=scores.device)
    layout = (*scores.stride()[:3], heads, queries, length, count)
    _block_sums_kernel[(blocks, rows)](
        scores,
        histogram,
        sums,
        *layout,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    _compact_kernel[(blocks, rows)](
        scores,
        histogram,
        sums,
        ids,
        *layout,
        BLOCK=_TOKENS,
        SUMS=_SUMS,
        enable_fp_fusion=True,
    )
    return ids


@triton.jit
def _load_scores(
    scores_ptr, stride_b, stride_h, stride_q, heads, queries, length, BLOCK: tl.constexpr
):
    """This program's tokens and their scores as int32, _EXCLUDED outside the row."""
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += (row // queries // heads) * stride_b
    scores_ptr += (row // queries % heads) * stride_h + (row % queries) * stride_q
    fill = tl.full((BLOCK,), _EXCLUDED, tl.uint8)
    score = tl.load(scores_ptr + tokens, mask=tokens < length, other=fill)
    return tokens, score.to(tl.int32)


@triton.jit
def _threshold(histogram_ptr, row, count):
    """The lowest score that is taken, how many tokens with that score, and how many in all."""
    bins = tl.arange(0, 256)
    bin_counts = tl.load(histogram_ptr + row * 256 + bins, mask=bins < _EXCLUDED, other=0)
    total = tl.sum(bin_counts)
    at_least = total - tl.cumsum(bin_counts, axis=0) + bin_counts
    threshold = tl.max(tl.where((at_least >= count) & (bins < _EXCLUDED), bins, 0), axis=0)
    of_equal = count - tl.sum(tl.where(bins > threshold, bin_counts, 0))
    return threshold, of_equal, tl.minimum(total, count)


@triton.jit(do_not_specialize=["length", "count"])
def _block_sums_kernel(
    scores_ptr,
    histogram_ptr,
    sums_ptr,
    stride_b,
    stride_h,
    stride_q,
    heads,
    queries,
    length,
    count,
    BLOCK: tl.constexpr,
):
    """How many scores of a block lie above the threshold, and on it."""
    row = tl.program_id(1).to(tl.int64)
    threshold, _, _ = _threshold(histogram_ptr, row, count)
    _, score = _load_scores(scores_ptr, stride_b, stride_h, stride_q, heads, queries, length, BLOCK)
    above = tl.sum(((score > threshold) & (score < _EXCLUDED)).to(tl.int32))
    equal = tl.sum((score == threshold).to(tl.int32))
    place = sums_ptr + (row * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(place, above)
    tl.store(place + 1, equal)


@triton.jit(do_not_specialize=["length", "count"])
def _compact_kernel(
    scores_ptr,
    histogram_ptr,
    sums_ptr,
    ids_ptr,
    stride_b,
    stride_h,
    stride_q,
    heads,
    queries,
    length,
    count,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Positions of the taken tokens of a block, behind those of the blocks before it."""
    row = tl.program_id(1).to(tl.int64)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    threshold, of_equal, target = _threshold(histogram_ptr, row, count)
    above_before, equal_before = sums_before(sums_ptr + row * blocks * 2, block, SUMS)
    tokens, score = _load_scores(
        scores_ptr, stride_b, stride_h, stride_q, heads, queries, length, BLOCK
    )
    above = (score > threshold) & (score < _EXCLUDED)
    equal = score == threshold
    above_ahead = above_before + tl.cumsum(above.to(tl.int32), axis=0) - above.to(tl.int32)
    equal_ahead = equal_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal.to(tl.int32)
    selection = above | (equal & (equal_ahead < of_equal))
    slot = above_ahead + tl.minimum(equal_ahead, of_equal)
    ids_ptr += row * count
    # A histogram of other scores must not lead outside the row.
    tl.store(ids_ptr + slot, tokens, mask=selection & (slot < count))
    fill_empty(ids_ptr, target, count, block, blocks, BLOCK)
