"""Scores of chosen keys in plain torch."""

from __future__ import annotations

import torch

from hf_kvret_kernels.host_attention import naive
from hf_kvret_kernels.paged import PagedRows


def gather_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.gather_scores.gather_scores``; everything is fp32 here."""
    return naive.host_scores(query, rows, ids, scale, softcap)
