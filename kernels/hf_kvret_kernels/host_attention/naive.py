"""The ranking of scored tokens in plain torch: the reference."""

from __future__ import annotations

import torch


def host_rank(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.host_attention.host_rank``."""
    B, H, Q, K = ids.shape
    scores = scores.view(B, H, scores.shape[1] // H, Q, K)
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    if scores.shape[2] == 1:
        lse = torch.zeros_like(lse)
    shares = torch.where(lse == float("inf"), (scores == lse).float().log(), scores - lse)
    relevance = shares.nan_to_num(nan=float("-inf"), neginf=float("-inf")).amax(2)
    relevance = relevance.masked_fill(ids < 0, float("-inf"))
    best, order = relevance.sort(dim=-1, descending=True, stable=True)
    result = ids.gather(-1, order).masked_fill(best == float("-inf"), -1)[..., :count]
    return torch.nn.functional.pad(result, (0, count - result.shape[-1]), value=-1)
