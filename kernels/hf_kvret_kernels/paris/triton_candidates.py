"""Triton kernels that choose the highest scores: block sums, then compaction behind them."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels.paris.codes import EXCLUDED

_EXCLUDED = tl.constexpr(EXCLUDED)
# Tokens of a program.
_TOKENS = 1024


def candidates(scores: torch.Tensor, histogram: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, queries, length = scores.shape
    rows, blocks = batch * heads * queries, triton.cdiv(length, _TOKENS)
    shape = (batch, heads, queries, count)
    ids = torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    scores, histogram = scores.contiguous(), histogram.contiguous()
    sums = torch.empty(rows, blocks, 2, dtype=torch.int32, device=scores.device)
    _block_sums_kernel[(blocks, rows)](
        scores, histogram, sums, length, blocks, count, BLOCK=_TOKENS
    )
    # A scan by torch rather than a loop over all earlier blocks in every program.
    sums = sums.cumsum(1, dtype=torch.int32)
    _compact_kernel[(blocks, rows)](
        scores, histogram, sums, ids, length, blocks, count, BLOCK=_TOKENS
    )
    return ids


@triton.jit
def _lowest_taken(histogram_ptr, row, count):
    """The lowest score that is taken, and how many of the tokens with that score."""
    bins = tl.arange(0, 256)
    held = tl.load(histogram_ptr + row * 256 + bins, mask=bins < _EXCLUDED, other=0)
    reached = tl.sum(held) - tl.cumsum(held, axis=0) + held
    threshold = tl.max(tl.where((reached >= count) & (bins < _EXCLUDED), bins, 0), axis=0)
    return threshold, count - tl.sum(tl.where(bins > threshold, held, 0))


@triton.jit
def _block_sums_kernel(
    scores_ptr, histogram_ptr, sums_ptr, length, blocks, count, BLOCK: tl.constexpr
):
    """How many scores of a block lie above the threshold, and on it."""
    row = tl.program_id(1).to(tl.int64)
    threshold, _ = _lowest_taken(histogram_ptr, row, count)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    excluded = tl.full((BLOCK,), _EXCLUDED, tl.uint8)
    score = tl.load(scores_ptr + row * length + tokens, mask=tokens < length, other=excluded)
    score = score.to(tl.int32)
    above = tl.sum(((score > threshold) & (score < _EXCLUDED)).to(tl.int32))
    equal = tl.sum((score == threshold).to(tl.int32))
    place = sums_ptr + (row * blocks + tl.program_id(0)) * 2
    tl.store(place, above)
    tl.store(place + 1, equal)


@triton.jit
def _compact_kernel(
    scores_ptr, histogram_ptr, sums_ptr, ids_ptr, length, blocks, count, BLOCK: tl.constexpr
):
    """Positions of the taken tokens of a block, behind those of the blocks before it."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    threshold, of_equal = _lowest_taken(histogram_ptr, row, count)
    place = sums_ptr + (row * blocks + block - 1) * 2
    above_before = tl.load(place, mask=block > 0, other=0)
    equal_before = tl.load(place + 1, mask=block > 0, other=0)

    tokens = block * BLOCK + tl.arange(0, BLOCK)
    excluded = tl.full((BLOCK,), _EXCLUDED, tl.uint8)
    score = tl.load(scores_ptr + row * length + tokens, mask=tokens < length, other=excluded)
    score = score.to(tl.int32)
    above = (score > threshold) & (score < _EXCLUDED)
    equal = score == threshold
    above_ahead = above_before + tl.cumsum(above.to(tl.int32), axis=0) - above.to(tl.int32)
    equal_ahead = equal_before + tl.cumsum(equal.to(tl.int32), axis=0) - equal.to(tl.int32)
    taken = above | (equal & (equal_ahead < of_equal))
    slot = above_ahead + tl.minimum(equal_ahead, of_equal)
    # A histogram of other scores must not lead outside the row.
    tl.store(ids_ptr + row * count + slot, tokens, mask=taken & (slot < count))
