"""Relevance in plain torch."""

from __future__ import annotations

import torch

from hf_kvret_kernels.top_k.naive import top_k


def log_shares(scores: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
    """Log-softmax over the last dimension; -inf stays -inf, also where all are.

    ``lse [..., 1]`` is the log-sum-exp to take off, where it is not that of ``scores`` themselves.
    """
    lse = scores.logsumexp(-1, keepdim=True) if lse is None else lse
    return scores - lse.masked_fill(lse == float("-inf"), 0.0)


def group_relevance(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.group_relevance``."""
    B, Hq, Q, n = scores.shape
    return log_shares(scores).view(B, heads, Hq // heads, Q, n).amax(dim=2)


def top_indices(scores: torch.Tensor, heads: int, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.top_indices``."""
    return top_k(group_relevance(scores, heads), count)


def best_ids(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.best_ids``."""
    n = scores.shape[-1]
    # With one head, the order of the scores is that of the shares.
    relevance = scores[:, :, :, 0] if scores.shape[3] == 1 else log_shares(scores).amax(dim=3)
    best = relevance.topk(count, dim=-1, sorted=False)
    # Those that are missing go behind all others, which keep their order.
    indices = best.indices.masked_fill(best.values == float("-inf"), n).sort(dim=-1).values
    result = ids.gather(-1, indices.clamp(max=n - 1))
    return result.masked_fill(indices == n, -1)


def host_rank(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.host_rank``."""
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


def count_ids(ids: torch.Tensor, total: torch.Tensor) -> None:
    """See ``hf_kvret_kernels.relevance.count_ids``."""
    total.add_((ids >= 0).sum())
