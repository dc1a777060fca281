"""Stage 2 for all tokens: what their codes say of their scores (ParisKV, equation 10)."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import choose_backend
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.paris.codes import ParisCodes
from hf_kvret_kernels.paris.selection import check_queries, check_stage_two, rerank
from hf_kvret_kernels.soft_cap import soft_cap_

# Numbers of keys that are decoded at once.
_PIECE_NUMBERS = 1 << 21


def estimates(
    q_rot: torch.Tensor,
    codes: ParisCodes,
    levels: torch.Tensor,
    *,
    m: int = 8,
    scale: float = 1.0,
    softcap: float | None = None,
    offset: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, G, n]`` fp32: what ``rerank`` estimates, of all tokens in order.

    Arguments and errors are its. In torch, keys are decoded a piece at a time, once for all
    queries.
    """
    check_queries(q_rot, codes.sign.device)
    check_stage_two(q_rot.shape, codes, levels, m, softcap, offset)
    batch, heads, queries, tables, dim = q_rot.shape
    length = codes.sign.shape[2]
    if choose_backend(backend, q_rot) != "naive":
        ids = torch.arange(length, dtype=torch.int32, device=q_rot.device)
        every = ids.expand(batch, heads, queries, -1).contiguous()
        return rerank(
            *(q_rot, codes, every, levels),
            m=m,
            scale=scale,
            softcap=softcap,
            offset=offset,
            backend=backend,
        )
    rows = q_rot.reshape(batch, heads, queries * tables, dim)
    out = q_rot.new_empty(batch, heads, queries * tables, length)
    step = max(1, _PIECE_NUMBERS // max(1, batch * heads * dim))
    for start in range(0, length, step):
        piece = codes.tokens(start, start + step)
        keys = naive.decode(piece.sign, piece.magnitude, piece.weight, levels, m)
        torch.matmul(rows, keys.transpose(-1, -2), out=out[..., start : start + step])
    scores = out.view(batch, heads, queries, tables, length)
    if offset is not None:
        scores += offset.unsqueeze(-1)
    return soft_cap_(scores.mul_(scale), softcap)
