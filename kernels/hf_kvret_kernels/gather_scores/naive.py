"""Scores of chosen keys in plain torch."""

from __future__ import annotations

import torch

from hf_kvret_kernels.gather_attention.naive import grouped_scores
from hf_kvret_kernels.paged import PagedRows


def gather_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.gather_scores.gather_scores``; everything is fp32 here."""
    keys, _ = rows.gather_with_torch(ids)
    scores = grouped_scores(query, keys, ids, scale, softcap)
    return scores.transpose(2, 3).reshape(*query.shape[:3], ids.shape[3])
