"""Empty slots behind what a selecting Triton kernel has taken."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fill_empty(ids_ptr, first_empty, count, block, blocks, BLOCK: tl.constexpr):
    """Write -1 to places ``first_empty .. count`` of a row of int32; each block writes a part."""
    nothing = tl.full((BLOCK,), -1, tl.int32)
    for start in range(first_empty + block * BLOCK, count, blocks * BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(ids_ptr + slots, nothing, mask=slots < count)
