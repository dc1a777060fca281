"""Attention over chosen rows in plain torch: gather them, then softmax in fp32.

A selecting head h has G query heads, ``h * G`` and those after it.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels.paged import HostRows
from hf_kvret_kernels.relevance.naive import log_shares
from hf_kvret_kernels.soft_cap import soft_cap_


def gather_attention(
    query: torch.Tensor, rows: HostRows, ids: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.gather_attention.gather_attention``; everything is fp32 here."""
    keys, values = rows.gather_with_torch(ids)
    scores = _grouped_scores(query, keys, ids, scale, softcap)
    lse = scores.logsumexp(-1, keepdim=True)
    out = torch.matmul(log_shares(scores, lse).exp(), values.float())
    shape = query.shape[:3]
    out = out.transpose(2, 3).reshape(*shape, values.shape[-1])
    return out, lse.transpose(2, 3).reshape(shape)


def gather_scores(
    query: torch.Tensor, rows: HostRows, ids: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """See ``hf_kvret_kernels.gather_attention.gather_scores``; everything is fp32 here."""
    keys, _ = rows.gather_with_torch(ids)
    scores = _grouped_scores(query, keys, ids, scale, softcap)
    return scores.transpose(2, 3).reshape(*query.shape[:3], ids.shape[3])


def _grouped_scores(
    query: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """``[B, H, Q, G, K]`` fp32 scores of ``keys [B, H, Q, K, Dk]``, -inf for holes."""
    B, Hq, Q, Dk = query.shape
    H = ids.shape[1]
    q = query.float().view(B, H, Hq // H, Q, Dk).transpose(2, 3)
    scores = soft_cap_(torch.matmul(q, keys.float().transpose(-1, -2)) * scale, softcap)
    return scores.masked_fill((ids < 0).unsqueeze(3), float("-inf"))
