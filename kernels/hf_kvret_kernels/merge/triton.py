"""The merge in Triton: one launch for all sets, a program for each query of a head."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import finite_base, log_total

# Values that a warp holds: 16 bytes of fp32 a thread.
_PER_WARP = 128


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink_logits: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.merge.merge_partials``."""
    batch, query_heads, queries, value_dim = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=out_dtype, device=outs[0].device)
    lse = torch.empty(outs[0].shape[:3], dtype=torch.float32, device=outs[0].device)
    if lse.numel() == 0:
        return out, lse
    block = triton.next_power_of_2(max(1, value_dim))
    _merge_kernel[(batch * query_heads * queries,)](
        tuple(part.contiguous() for part in outs),
        tuple(part.contiguous() for part in lses),
        lse if sink_logits is None else sink_logits.contiguous(),
        out,
        lse,
        query_heads,
        queries,
        HAS_SINKS=sink_logits is not None,
        PARTS=len(outs),
        DV=value_dim,
        BLOCK=block,
        num_warps=max(1, min(4, block // _PER_WARP)),
        enable_fp_fusion=True,
    )
    return out, lse


@triton.jit(do_not_specialize=["queries"])
def _merge_kernel(
    outs,
    lses,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    heads,
    queries,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query of a head; ``outs`` and ``lses`` are tuples of PARTS pointers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row // queries % heads).to(tl.float32)
        peak = sink
    for i in tl.static_range(PARTS):
        peak = tl.maximum(peak, tl.load(lses[i] + row))
    base = finite_base(peak)
    mass = tl.zeros((), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[i] + row) - base)
        part = tl.load(outs[i] + row * DV + columns, mask=columns < DV, other=0.0)
        total += weight * part.to(tl.float32)
        mass += weight
    if HAS_SINKS:
        mass += tl.exp(sink - base)
    # At least 1 where there is a peak, and 0 without.
    mean = total / tl.maximum(mass, 1.0)
    tl.store(out_ptr + row * DV + columns, mean.to(out_ptr.dtype.element_ty), mask=columns < DV)
    tl.store(lse_ptr + row, log_total(base, mass))
