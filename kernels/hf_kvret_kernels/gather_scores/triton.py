"""Scores of chosen keys in Triton: a program takes one selection and a block of its ids.

It follows them through the page table to rows in device or pinned host memory, and scores each
key with all query heads that share the selection. The values of the rows are not read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    CHANGING_STRIDES,
    TL_DTYPES,
    Columns,
    capped_scores,
    dot_dtype,
    head_tile,
    load_ids,
    load_rows,
    row_pointers,
    score_factors,
    tile_heads,
)
from hf_kvret_kernels.paged import PagedRows

# Bytes of keys that a program asks for at once, and the most keys: several 16-byte loads a thread.
_TILE_BYTES = 16 << 10
_MOST_KEYS = 64


@triton.jit(do_not_specialize=["heads", "queries", "count", "tokens", "blocks", *CHANGING_STRIDES])
def _gather_scores_kernel(
    query,
    ids_ptr,
    table,
    page_address,
    scores_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_q,
    stride_ids_b,
    stride_ids_h,
    stride_ids_q,
    stride_ids_k,
    stride_table_b,
    stride_table,
    heads,
    queries,
    count,
    tokens,
    blocks,
    inner,
    outer,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    DK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    REST: tl.constexpr,
    ALIGN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    index = (tl.program_id(0) // blocks).to(tl.int64)
    positions = (tl.program_id(0) % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    b, h, q_index, group = head_tile(index, heads, queries, BLOCK_G, TILES)

    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q_index * stride_ids_q
    inside = positions < count
    ids, id_mask = load_ids(ids_row, positions, inside, stride_ids_k, tokens)
    table_row = table + b * stride_table_b
    rows = row_pointers(
        ids,
        id_mask,
        h // SHARE,
        table_row,
        page_address,
        stride_table,
        PAGE_LEN,
        WIDTH,
        ALIGN,
        DTYPE,
    )
    columns = tl.arange(0, BLOCK_DK)
    key = load_rows(rows + columns[None, :], id_mask, columns, MAIN, BLOCK_DK, True)

    query_heads = h * G + group
    q_rows = query + b * stride_q_b + query_heads[:, None] * stride_q_h + q_index * stride_q_q
    q = load_rows(q_rows + columns[None, :], group < G, columns, MAIN, BLOCK_DK, True)
    dots = tl.dot(q.to(DOT_DTYPE), tl.trans(key).to(DOT_DTYPE), input_precision="ieee")
    if REST:
        columns = tl.arange(0, REST)
        key = load_rows(rows + MAIN + columns[None, :], id_mask, columns, DK - MAIN, REST, True)
        q = load_rows(q_rows + MAIN + columns[None, :], group < G, columns, DK - MAIN, REST, True)
        key = tl.trans(key).to(DOT_DTYPE)
        dots = tl.dot(q.to(DOT_DTYPE), key, dots, input_precision="ieee")
    scores = capped_scores(dots, inner, outer, SOFTCAP)
    scores = tl.where(id_mask[None, :], scores, float("-inf"))
    target = (b * heads * G + query_heads) * queries + q_index
    tl.store(
        scores_ptr + target[:, None] * count + positions[None, :],
        scores,
        mask=(group < G)[:, None] & inside[None, :],
    )


def gather_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.gather_scores.gather_scores``."""
    batch, query_heads, queries, _ = query.shape
    heads, count = ids.shape[1], ids.shape[3]
    scores = torch.empty(
        batch, query_heads, queries, count, dtype=torch.float32, device=query.device
    )
    if scores.numel() == 0:
        return scores
    group = query_heads // heads
    tile = tile_heads(group, rows.key_dim)
    tiles = triton.cdiv(group, tile)
    keys = Columns.of(rows.key_dim)
    columns = max(16, triton.next_power_of_2(rows.key_dim))
    block_k = max(16, min(_MOST_KEYS, _TILE_BYTES // (columns * query.element_size())))
    blocks = triton.cdiv(count, block_k)
    _gather_scores_kernel[(batch * heads * tiles * queries * blocks,)](
        query,
        ids,
        rows.table,
        rows.addresses(),
        scores,
        *query.stride()[:3],
        *ids.stride(),
        *rows.table.stride(),
        heads,
        queries,
        count,
        rows.token_count,
        blocks,
        *score_factors(scale, softcap),
        G=group,
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        DK=rows.key_dim,
        WIDTH=rows.width,
        BLOCK_G=tile,
        TILES=tiles,
        BLOCK_K=block_k,
        MAIN=keys.main,
        BLOCK_DK=keys.block,
        REST=keys.rest,
        ALIGN=rows.alignment_bytes(),
        SOFTCAP=softcap is not None,
        DTYPE=TL_DTYPES[rows.dtype],
        DOT_DTYPE=dot_dtype(rows.dtype),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return scores
