"""What the Triton kernels of stage 2 share: levels and their numbers as a thread takes them."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pairs_of_levels(levels_ptr, LEVELS: tl.constexpr):
    """Two levels in 64 bits, for each number that codes two: one lookup for two coordinates."""
    numbers = tl.arange(0, LEVELS * LEVELS)
    first = tl.load(levels_ptr + numbers % LEVELS).to(tl.uint32, bitcast=True)
    second = tl.load(levels_ptr + numbers // LEVELS).to(tl.uint32, bitcast=True)
    return (second.to(tl.uint64) << 32) | first.to(tl.uint64)


@triton.jit
def split_words(words_ptr, rows, BYTES: tl.constexpr, PIECE: tl.constexpr):
    """``[rows, PIECE // 4, 4]`` int32, in whose lowest 24 bits are eight codes of three bits.

    Of PIECE bytes of signs among the BYTES of a row. There are three words to each four of them.
    """
    QUARTER: tl.constexpr = PIECE // 4
    words_ptr += rows[:, None] * (3 * (BYTES // 4)) + 3 * tl.arange(0, QUARTER)[None, :]
    first = tl.load(words_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(words_ptr + 1).to(tl.uint32, bitcast=True)
    third = tl.load(words_ptr + 2).to(tl.uint32, bitcast=True)
    even = tl.join(first, (second >> 16) | (third << 16))
    odd = tl.join((first >> 24) | (second << 8), third >> 8)
    return tl.reshape(tl.join(even, odd), (rows.shape[0], QUARTER, 4)).to(tl.int32)
