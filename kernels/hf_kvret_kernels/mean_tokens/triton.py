"""Logits of mean tokens in Triton: a program for each mean, selection and tile of query heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import capped_scores, head_tile, load_rows, score_factors

if TYPE_CHECKING:
    from hf_kvret_kernels.mean_tokens import BlockMeans

# Numbers of queries that a program holds, and ids that it counts at a time.
_HELD, _IDS = 4096, 1024


@triton.jit(do_not_specialize=["heads", "queries", "tokens", "count", "block_len"])
def _logits_kernel(
    query,
    keys,
    counts,
    ids_ptr,
    logits,
    stride_q_b,
    stride_q_h,
    stride_q_q,
    heads,
    queries,
    tokens,
    count,
    block_len,
    inner,
    outer,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    IDS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """``heads`` select, SHARE of them read the means of one KV head."""
    # One dimension: the others of a grid end at 65,535.
    program = tl.program_id(0).to(tl.int64)
    index, r = program // tokens, program % tokens
    b, h, q_index, group = head_tile(index, heads, queries, TILE, TILES)
    columns = tl.arange(0, BLOCK)
    query_heads = h * G + group
    q_rows = query + b * stride_q_b + query_heads[:, None] * stride_q_h + q_index * stride_q_q
    q = load_rows(q_rows + columns[None, :], group < G, columns, DIM, BLOCK, True).to(tl.float32)
    offset = (b * (heads // SHARE) + h // SHARE) * tokens + r
    key = tl.load(keys + offset * DIM + columns, mask=columns < DIM, other=0.0)
    scores = capped_scores(tl.sum(q * key[None, :], axis=1), inner, outer, SOFTCAP)

    ids_row = ids_ptr + ((b * heads + h) * queries + q_index) * count
    chosen = tl.zeros([IDS], tl.int32)
    for start in range(0, count, IDS):
        indices = start + tl.arange(0, IDS)
        ids = tl.load(ids_row + indices, mask=indices < count, other=-1)
        own = ids >= 0
        if block_len > 0:
            own = own & (ids // block_len == r)
        chosen += own.to(tl.int32)
    left = tl.load(counts + b * tokens + r) - tl.sum(chosen, axis=0)
    log_left = tl.where(left > 0, tl.log(tl.maximum(left, 1).to(tl.float32)), float("-inf"))
    rows = (b * heads * G + query_heads) * queries + q_index
    tl.store(logits + rows * tokens + r, scores + log_left, mask=group < G)


def mean_logits(
    query: torch.Tensor,
    means: BlockMeans,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.mean_tokens.mean_logits``."""
    batch, query_heads, queries, dim = query.shape
    kv_heads, tokens = means.keys.shape[1:3]
    heads, count = ids.shape[1], ids.shape[3]
    shape = batch, query_heads, queries, tokens
    logits = torch.empty(shape, dtype=torch.float32, device=query.device)
    if logits.numel() == 0:
        return logits
    group, block = query_heads // heads, triton.next_power_of_2(dim)
    tile = min(triton.next_power_of_2(group), max(1, _HELD // block))
    tiles = triton.cdiv(group, tile)
    _logits_kernel[(batch * heads * tiles * queries * tokens,)](
        query,
        means.keys,
        means.counts,
        ids.contiguous(),
        logits,
        *query.stride()[:3],
        heads,
        queries,
        tokens,
        count,
        means.block_len,
        *score_factors(scale, softcap),
        G=group,
        SHARE=heads // kv_heads,
        DIM=dim,
        BLOCK=block,
        TILE=tile,
        TILES=tiles,
        IDS=min(_IDS, triton.next_power_of_2(max(16, count))),
        SOFTCAP=softcap is not None,
        enable_fp_fusion=True,
    )
    return logits
