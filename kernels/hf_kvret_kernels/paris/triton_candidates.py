"""Triton kernel that writes down the tokens of the highest scores, each block behind the others."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_places import fill_empty
from hf_kvret_kernels.paris.codes import EXCLUDED
from hf_kvret_kernels.paris.triton_collide import ALIGN, Collisions

_EXCLUDED = tl.constexpr(EXCLUDED)


def compact(found: Collisions, count: int) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 positions, ascending, -1 behind; ``count`` as for ``collide``."""
    lead = found.scores.shape[:3]
    ids = torch.empty(*lead, count, dtype=torch.int32, device=found.scores.device)
    if ids.numel():
        _compact_kernel[(found.before.shape[3], lead.numel())](
            found.scores,
            found.plan,
            found.before,
            ids,
            found.scores.stride(2) // ALIGN,
            count,
            BLOCK=found.block,
            ALIGN=ALIGN,
            enable_fp_fusion=True,
        )
    return ids


@triton.jit(do_not_specialize=["stride", "count"])
def _compact_kernel(
    scores_ptr,
    plan_ptr,
    before_ptr,
    ids_ptr,
    stride,
    count,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Positions of the taken tokens of a block, behind those of the blocks before it."""
    row = tl.program_id(1).to(tl.int64)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    threshold = tl.load(plan_ptr + row * 4)
    of_equal = tl.load(plan_ptr + row * 4 + 1)
    before_ptr += (row * blocks + block) * 2
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    fill = tl.full((BLOCK,), _EXCLUDED, tl.uint8)
    row_end = stride * ALIGN
    score = tl.load(scores_ptr + row * row_end + tokens, mask=tokens < row_end, other=fill)
    score = score.to(tl.int32)
    above = (score > threshold) & (score < _EXCLUDED)
    # Counts above the threshold in the upper half and on it in the lower: one prefix sum for both,
    # and neither reaches 2**15.
    pair = tl.where(above, 65536, (score == threshold).to(tl.int32))
    ahead = tl.cumsum(pair, axis=0) - pair
    equal_ahead = tl.load(before_ptr + 1) + (ahead & 65535)
    selection = above | ((pair == 1) & (equal_ahead < of_equal))
    slot = tl.load(before_ptr) + (ahead >> 16) + tl.minimum(equal_ahead, of_equal)
    ids_ptr += row * count
    tl.store(ids_ptr + slot, tokens, mask=selection)
    fill_empty(ids_ptr, tl.load(plan_ptr + row * 4 + 2), count, block, blocks, BLOCK)
