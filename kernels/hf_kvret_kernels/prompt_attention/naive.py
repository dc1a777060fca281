"""Block-wise attention in plain torch; also what runs on a CPU.

The online softmax of FlashAttention (Dao et al. 2022, algorithm 1): for each block of queries,
walk over blocks of keys with a running peak ``m``, sum ``l`` and weighted values ``acc``. Heads
of a group are folded into the rows of a matrix, so K and V are never repeated. Everything is
computed in fp32: a matmul in bf16 would round the scores to 8 bits before the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels.soft_cap import soft_cap_

# Scores of one kv head that are worked on at once: with exp they pass through the L2 cache.
_SCORES = 1 << 17
_ROWS = 512
_KEYS = (256, 4096)


def prompt_attention(call: DenseCall, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.prompt_attention.prompt_attention``."""
    query, key, value, scale, causal_offset, valid, softcap = call
    B, Hq, Q, _ = query.shape
    Hkv, T, Dv = value.shape[1:]
    G = Hq // Hkv
    out = torch.empty(B, Hq, Q, Dv, dtype=out_dtype, device=query.device)
    lse = torch.empty(B, Hq, Q, dtype=torch.float32, device=query.device)
    step = max(1, min(Q, _ROWS // G))
    key_step = min(max(_SCORES // (G * step), _KEYS[0]), _KEYS[1])
    blocks = list(_key_blocks(valid, T, key_step))
    for first in range(0, Q, step):
        last = min(first + step, Q)
        n = last - first
        offset = None if causal_offset is None else causal_offset + first
        q = query[:, :, first:last].float() * scale
        q = q.reshape(B * Hkv, G * n, -1)
        m = q.new_full((B * Hkv, G * n, 1), float("-inf"))
        l = torch.zeros_like(m)  # noqa: E741 - the symbol of the paper
        acc = q.new_zeros(B * Hkv, G * n, Dv)
        for start, stop, holes in blocks:
            if offset is not None:
                stop = min(stop, offset + n)
                if stop <= start:
                    break
            k = key[:, :, start:stop].float().reshape(B * Hkv, stop - start, -1)
            v = value[:, :, start:stop].float().reshape(B * Hkv, stop - start, Dv)
            s = soft_cap_(torch.bmm(q, k.transpose(1, 2)), softcap)
            group_scores = s.view(B, Hkv, G, n, stop - start)
            if holes and valid is not None:
                hole = ~valid[:, start:stop]
                group_scores.masked_fill_(hole.view(B, 1, 1, 1, -1), float("-inf"))
                v = v.view(B, Hkv, -1, Dv).masked_fill(hole.view(B, 1, -1, 1), 0.0).view(v.shape)
            if offset is not None and stop - 1 > offset:
                group_scores.masked_fill_(_future(offset, n, start, stop, s.device), float("-inf"))
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = m_new.masked_fill(m_new == float("-inf"), 0.0)
            p = s.sub_(base).exp_()
            shrink = (m - base).exp_()
            l.mul_(shrink).add_(p.sum(-1, keepdim=True))
            acc.mul_(shrink).baddbmm_(p, v)
            m = m_new
        nonzero = l > 0
        safe = l.masked_fill(~nonzero, 1.0)
        out[:, :, first:last] = (acc / safe).view(B, Hq, n, Dv)
        lse[:, :, first:last] = (m + safe.log()).view(B, Hq, n)
    return out, lse


def _key_blocks(valid: torch.Tensor | None, T: int, step: int) -> Iterator[tuple[int, int, bool]]:
    """``(start, stop, has holes)`` of the key blocks in which any batch row has a valid token."""
    for start in range(0, T, step):
        stop = min(start + step, T)
        if valid is None:
            yield start, stop, False
            continue
        part = valid[:, start:stop]
        if part.any():
            yield start, stop, not bool(part.all())


def _future(offset: int, n: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """``[n, stop - start]`` bool: key ``start + j`` comes after what query i may see."""
    last_key = torch.arange(offset, offset + n, device=device)
    return torch.arange(start, stop, device=device) > last_key[:, None]
