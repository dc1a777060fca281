"""Proxy scores in plain torch."""

from __future__ import annotations

import torch

from hf_kvret_kernels.proxy import ProxyCall
from hf_kvret_kernels.relevance.naive import group_relevance
from hf_kvret_kernels.soft_cap import soft_cap_
from hf_kvret_kernels.top_k.naive import top_k


def relevance(call: ProxyCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.relevance``."""
    query, rows, heads, offset = call.query.float(), call.rows, call.heads, None
    if call.projection is not None:
        query, offset = call.projection.of(query)
    B, Hq, Q, r = query.shape
    F, n = rows.shape[1:3]
    q = query.reshape(B, F, Hq // F * Q, r)
    scores = torch.matmul(q, rows.float().transpose(-1, -2)).view(B, Hq, Q, n)
    if offset is not None:
        scores = scores + offset.unsqueeze(-1)
    scores = scores * call.scale
    soft_cap_(scores, call.softcap)
    if call.valid is not None:
        scores = scores.masked_fill(~call.valid[:, None, None], float("-inf"))
    return scores if heads == Hq else group_relevance(scores, heads)


def top_indices(call: ProxyCall, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.top_indices``."""
    if call.kept is not None:
        call.kept.rows.index_copy_(2, call.kept.next[:1], call.query)
        call.kept.next[:1].add_(1)
    return top_k(relevance(call), count)
