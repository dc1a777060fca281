"""Proxy scores in plain torch."""

from __future__ import annotations

import torch

from hf_kvret_kernels.proxy import ProxyCall
from hf_kvret_kernels.relevance.naive import group_relevance
from hf_kvret_kernels.soft_cap import soft_cap_
from hf_kvret_kernels.top_k.naive import top_k


def relevance(call: ProxyCall) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.relevance``."""
    query, rows, heads, valid, offset, softcap = call
    B, Hq, Q, r = query.shape
    F, n = rows.shape[1:3]
    q = query.reshape(B, F, Hq // F * Q, r)
    scores = torch.matmul(q, rows.float().transpose(-1, -2)).view(B, Hq, Q, n)
    if offset is not None:
        scores = scores + offset.unsqueeze(-1)
    soft_cap_(scores, softcap)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
    return scores if heads == Hq else group_relevance(scores, heads)


def top_indices(call: ProxyCall, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.proxy.top_indices``."""
    return top_k(relevance(call), count)
