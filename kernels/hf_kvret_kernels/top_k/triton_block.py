"""The best of a few thousand candidates in one launch: a program holds all of a selection's.

Scores become integers of the same order, and bisection finds the lowest that is taken: each step
counts, over all candidates at once, those above the middle. It ends as soon as the count is right.
What is taken moves to the front behind a prefix sum. Nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import best_share, log_sum_exp

# Candidates of a program of 16 warps: 32 a thread, for which there are 128 registers. Compiled for
# sm80 120 bytes a thread spill at the most, for sm90 160; next to nothing at half of it.
MOST = 1 << 14
_PER_WARP = 512
_MOST_WARPS = 16
# Bits of -0.0, which as an integer are the least of all, and of -inf.
_LEAST = tl.constexpr(-2147483648)
_MINUS_INF = tl.constexpr(-8388608)
_GREATEST = tl.constexpr(2147483647)
# Arguments that change with the number of tokens held.
_CHANGING = ("stride_b", "stride_h", "stride_q", "stride_g", "length", "count")


def best_ids(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.best_ids``; at most ``MOST`` candidates.

    Of equal ones the first are taken.
    """
    return _launch(scores, ids.contiguous(), count)


def top_places(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 places of the highest of ``scores [B, H, Q, n]``, ascending.

    n is at most ``MOST``, else as ``best_ids`` with the places themselves as ids.
    """
    return _launch(scores.unsqueeze(3), None, count)


def _launch(scores: torch.Tensor, ids: torch.Tensor | None, count: int) -> torch.Tensor:
    batch, heads, queries, group, length = scores.shape
    shape = (batch, heads, queries, count)
    out = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(length)
    _best_kernel[(batch * heads * queries,)](
        scores,
        scores if ids is None else ids,
        out,
        *scores.stride(),
        heads,
        queries,
        length,
        count,
        HAS_IDS=ids is not None,
        G=group,
        BLOCK=block,
        num_warps=min(_MOST_WARPS, max(1, block // _PER_WARP)),
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _threshold(order, target, BLOCK: tl.constexpr):
    """The threshold of ``order [BLOCK]`` that ``target`` of them reach; _LEAST counts as none.

    More may reach it where several are equal to it, never fewer.
    """
    some = order != _LEAST
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
    scores_ptr,
    ids_ptr,
    out_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_g,
    stride_n,
    heads,
    queries,
    length,
    count,
    HAS_IDS: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All candidates of one selection, scored by G query heads."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < length
    scores_ptr += (row // queries // heads) * stride_b + (row // queries % heads) * stride_h
    scores_ptr += (row % queries) * stride_q + places.to(tl.int64) * stride_n
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for g in range(G):
        score = tl.load(scores_ptr + g * stride_g, mask=inside, other=float("-inf"))
        best = score if G == 1 else best_share(best, score, log_sum_exp(score))

    # Integers from here on, so that no unit of the GPU takes a denormal for 0.
    bits = best.to(tl.int32, bitcast=True)
    valid = bits != _MINUS_INF
    bits = tl.where(bits == _LEAST, 0, bits)
    order = tl.where(valid, bits ^ ((bits >> 31) & _GREATEST), _LEAST)
    target = tl.minimum(count, tl.sum(valid.to(tl.int32), axis=0))
    threshold = _threshold(order, target, BLOCK)
    # Counts above the threshold in the upper half and on it in the lower: one prefix sum for both,
    # and neither reaches 2**15.
    pair = tl.where(order > threshold, 65536, (valid & (order == threshold)).to(tl.int32))
    of_equal = target - (tl.sum(pair, axis=0) >> 16)
    ahead = tl.cumsum(pair, axis=0) - pair
    equal_ahead = ahead & 65535
    selection = (pair > 1) | ((pair == 1) & (equal_ahead < of_equal))
    slot = (ahead >> 16) + tl.minimum(equal_ahead, of_equal)
    result = places
    if HAS_IDS:
        result = tl.load(ids_ptr + row * length + places, mask=selection, other=-1)
    out_ptr += row * count
    tl.store(out_ptr + slot, result, mask=selection)
    tl.store(
        out_ptr + places,
        tl.full((BLOCK,), -1, tl.int32),
        mask=(places >= target) & (places < count),
    )
