"""The merge in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sink_logits: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.merge.merge_partials``."""
    outs = [chunk for out in outs for chunk in (out.unbind(3) if out.ndim == 5 else (out,))]
    logs = torch.cat([lse.movedim(3, 0) if lse.ndim == 4 else lse.unsqueeze(0) for lse in lses])
    if sink_logits is not None:
        sinks = sink_logits.float().view(1, 1, -1, 1).expand(1, *logs.shape[1:])
        logs = torch.cat([logs, sinks])
    peak = logs.amax(dim=0)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    # Weights relative to the largest: large logits would lose digits in a difference to the sum.
    weights = (logs - peak).exp()
    mass = weights.sum(dim=0)
    total = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, weight in zip(outs, weights, strict=False):
        total += weight.unsqueeze(-1) * out
    return (total / mass.clamp(min=1.0).unsqueeze(-1)).to(out_dtype), peak + mass.log()
