"""Attention over chosen rows in plain torch: gather them, then softmax in fp32."""

from __future__ import annotations

import torch

from hf_kvret_kernels.paged import PagedRows


def gather_attention(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.gather_attention.gather_attention``; everything is fp32 here."""
    B, Hq, Q, Dk = query.shape
    H = ids.shape[1]
    G = Hq // H
    k, v = rows.gather(ids, backend="naive")
    q = query.float().view(B, H, G, Q, Dk).transpose(2, 3)
    scores = torch.matmul(q, k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill((ids < 0).unsqueeze(3), float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    out = torch.matmul(weights, v.float())
    out = out.transpose(2, 3).reshape(B, Hq, Q, rows.value_dim)
    return out, lse.squeeze(-1).transpose(2, 3).reshape(B, Hq, Q)
