"""The merge in Triton: one launch for all sets, a program for each query of a head."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import add_sinks, empty_merge, finish_merge, merge_all

# Chunks of a set that a program loads at once, and numbers of them that a warp holds.
_MOST_AT_ONCE = 64
_PER_WARP = 1024


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink_logits: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.merge.merge_partials``."""
    shape, value_dim = lses[0].shape[:3], outs[0].shape[-1]
    out = torch.empty(*shape, value_dim, dtype=out_dtype, device=outs[0].device)
    lse = torch.empty(shape, dtype=torch.float32, device=outs[0].device)
    if lse.numel() == 0:
        return out, lse
    splits = tuple(part.shape[3] if part.ndim == 4 else 1 for part in lses)
    blocks = tuple(min(_MOST_AT_ONCE, triton.next_power_of_2(count)) for count in splits)
    block = triton.next_power_of_2(max(1, value_dim))
    _merge_kernel[(lse.numel(),)](
        tuple(part.contiguous() for part in outs),
        tuple(part.contiguous() for part in lses),
        splits,
        lse if sink_logits is None else sink_logits.contiguous(),
        out,
        lse,
        *shape[1:],
        HAS_SINKS=sink_logits is not None,
        PARTS=len(outs),
        BLOCKS=blocks,
        DV=value_dim,
        BLOCK=block,
        num_warps=max(1, min(8, max(blocks) * block // _PER_WARP)),
        enable_fp_fusion=True,
    )
    return out, lse


@triton.jit(do_not_specialize=["splits", "queries"])
def _merge_kernel(
    outs, lses, splits, sinks_ptr, out_ptr, lse_ptr, heads, queries,
    HAS_SINKS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One query of a head.

    ``outs`` and ``lses`` are tuples of PARTS pointers, ``splits`` says in how many chunks each part
    comes, BLOCKS how many of them are loaded at once.
    """
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, BLOCK)
    peak, mass, total = empty_merge(1, BLOCK)
    for i in tl.static_range(PARTS):
        peak, mass, total = merge_all(
            outs[i], lses[i], rows, rows >= 0, splits[i], peak, mass, total,
            DV, BLOCKS[i], BLOCK, "",
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + (rows // queries % heads)[:, None]).to(tl.float32)
        peak, mass, total = add_sinks(sink, peak, mass, total)
    mean, log = finish_merge(peak, mass, total)
    tl.store(
        out_ptr + rows[:, None] * DV + columns[None, :],
        mean.to(out_ptr.dtype.element_ty),
        mask=(columns < DV)[None, :],
    )
    tl.store(lse_ptr + rows[:, None], log)
