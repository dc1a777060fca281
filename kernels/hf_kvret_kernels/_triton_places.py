"""Pieces that the selecting Triton kernels share: a block's place among others, and empty slots."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_before(sums_ptr, block, BLOCK: tl.constexpr):
    """What the blocks before ``block`` add up to, of pairs ``[blocks, 2]`` of int32.

    Every block adds them up for itself: a few hundred numbers from the cache take less than a
    launch of a scan.
    """
    first = tl.zeros((BLOCK,), tl.int32)
    second = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, block, BLOCK):
        others = start + tl.arange(0, BLOCK)
        first += tl.load(sums_ptr + 2 * others, mask=others < block, other=0)
        second += tl.load(sums_ptr + 2 * others + 1, mask=others < block, other=0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def fill_empty(ids_ptr, first_empty, count, block, blocks, BLOCK: tl.constexpr):
    """Write -1 to places ``first_empty .. count`` of a row of int32; each block writes a part."""
    nothing = tl.full((BLOCK,), -1, tl.int32)
    for start in range(first_empty + block * BLOCK, count, blocks * BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(ids_ptr + slots, nothing, mask=slots < count)
