"""Sums of blocks in plain torch: the reference."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels.soft_cap import soft_cap_

# Scores that are held at once.
_SCORES = 1 << 22


def block_lse(call: DenseCall, positions: torch.Tensor, block: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.block_lse.block_lse``."""
    query, key, valid = call.query, call.key, call.valid
    batch, heads, tokens, _ = key.shape
    group, queries = query.shape[1] // heads, query.shape[2]
    grouped = query.float().unflatten(1, (heads, group)).flatten(2, 3) * call.scale
    last = positions.repeat(1, group)[:, None, :, None]
    length = max(1, _SCORES // max(1, batch * heads * grouped.shape[2]) // block) * block
    parts = [query.new_empty(batch, heads, grouped.shape[2], 0, dtype=torch.float32)]
    for start in range(0, tokens, length):
        some = key[:, :, start : start + length].float()
        count = some.shape[2]
        scores = soft_cap_(grouped @ some.transpose(2, 3), call.softcap)
        unseen = torch.arange(start, start + count, device=key.device) > last
        if valid is not None:
            unseen = unseen | ~valid[:, None, None, start : start + count]
        scores.masked_fill_(unseen, float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, -count % block), value=float("-inf"))
        parts.append(scores.unflatten(3, (-1, block)).logsumexp(4))
    return torch.cat(parts, dim=3).unflatten(2, (group, queries)).flatten(1, 2)
