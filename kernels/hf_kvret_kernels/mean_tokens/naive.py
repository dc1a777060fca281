"""Logits of mean tokens in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

if TYPE_CHECKING:
    from hf_kvret_kernels.mean_tokens import BlockMeans


def mean_logits(
    query: torch.Tensor,
    means: BlockMeans,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.mean_tokens.mean_logits``."""
    batch, query_heads, queries, dim = query.shape
    heads, tokens = means.keys.shape[1:3]
    grouped = query.float().reshape(batch, heads, query_heads // heads * queries, dim)
    scores = soft_cap_(grouped @ means.keys.transpose(-1, -2) * scale, softcap)
    left = means.counts[:, None, None] - _selected_counts(ids, tokens, means.block_len)
    logs = left.clamp(min=0).log().repeat_interleave(query_heads // ids.shape[1], dim=1)
    return scores.view(batch, query_heads, queries, tokens) + logs


def _selected_counts(ids: torch.Tensor, tokens: int, block_len: int) -> torch.Tensor:
    """``[B, H, Q, R]`` int64: how many of ``ids [B, H, Q, K]`` lie in each block."""
    if block_len == 0:
        return (ids >= 0).sum(dim=-1, keepdim=True)
    blocks = torch.where(ids < 0, tokens, ids // block_len).long().clamp(max=tokens)
    counts = ids.new_zeros(*ids.shape[:-1], tokens + 1, dtype=torch.long)
    return counts.scatter_add_(-1, blocks, torch.ones_like(blocks))[..., :tokens]
