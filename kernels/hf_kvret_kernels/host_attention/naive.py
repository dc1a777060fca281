"""Attention and scores over chosen rows in plain torch: the reference."""

from __future__ import annotations

import torch

from hf_kvret_kernels.gather_attention import naive
from hf_kvret_kernels.paged import PagedRows


def host_attention(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.host_attention.host_attention``; everything is fp32 here."""
    return naive.gather_attention(query, rows, ids, scale, softcap)


def host_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.host_attention.host_scores``; everything is fp32 here."""
    B, Hq, Q, Dk = query.shape
    H, K = ids.shape[1], ids.shape[3]
    k, _ = rows.gather(ids, backend="naive")
    q = query.float().view(B, H, Hq // H, Q, Dk).transpose(2, 3)
    scores = torch.matmul(q, k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill((ids < 0).unsqueeze(3), float("-inf"))
    return scores.transpose(2, 3).reshape(B, Hq, Q, K)


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
    chosen = ids.gather(-1, order).masked_fill(best == float("-inf"), -1)[..., :count]
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)
