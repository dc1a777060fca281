"""How much tokens matter to the query heads of a KV head."""

from __future__ import annotations

import torch

from hf_kvret_kernels import relevance


def group_relevance(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """How much each token matters to the query heads of a KV head: max of their log-softmaxes.

    Raw scores of different heads are not comparable: each softmax has a scale of its own.

    Args:
        scores: ``[B, Hq, Q, n]`` fp32 attention logits, -inf for tokens that don't take part.
        heads: number of KV heads; ``Hq`` is a multiple.

    Returns:
        ``[B, heads, Q, n]`` fp32, at most 0; -inf stays -inf for tokens that don't take part.
    """
    return relevance.group_relevance(scores, heads)
