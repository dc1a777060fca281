"""Scores as integers, and the highest of those that a program holds."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-2147483648)
"""Of scores of -inf, which are never taken: below all others."""
_GREATEST = tl.constexpr(2147483647)
# Bits of -inf and of -0.0 as signed integers.
_MINUS_INF = tl.constexpr(-8388608)
_MINUS_ZERO = tl.constexpr(-2147483648)


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
