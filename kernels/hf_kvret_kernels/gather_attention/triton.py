"""Attention over chosen rows in Triton, and the scores of their keys.

The ids of a query are split over several programs. A program takes one selection (a batch row, a
selecting head, a query) and a chunk of its ids, follows them through the page table to rows in
device or pinned host memory, and serves all query heads that share the selection. Chunks that were
attended to are merged by whoever needs them merged. For scores no value is read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    CHANGING_STRIDES,
    LOG2_E,
    TL_DTYPES,
    Columns,
    capped_scores,
    dot_dtype,
    finish_softmax,
    head_tile,
    load_ids,
    load_rows,
    partial_buffers,
    row_pointers,
    score_factors,
    selection_numbers,
    softmax_step,
    split_plan,
    tile_heads,
)
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows

# Programs for each multiprocessor to aim at, by cutting selections into chunks: loads have a long
# way, so several must be on it. And the chunks of a selection, at most. Not measured.
_WAVES, _MOST_SPLITS = 4, 64
# Bytes of keys whose scores a program computes at once, and the most keys: several 16-byte loads a
# thread.
_TILE_BYTES, _MOST_KEYS = 16 << 10, 64


@triton.jit(
    do_not_specialize=["heads", "queries", "count", "tokens", "split_len", *CHANGING_STRIDES]
)
def _attend_kernel(
    query, ids_ptr, table, page_address, out, lse, tickets,
    stride_q_b, stride_q_h, stride_q_q, stride_ids_b, stride_ids_h, stride_ids_q, stride_ids_k,
    stride_table_b, stride_table,
    heads, queries, count, tokens, split_len, inner, outer,
    G: tl.constexpr, SHARE: tl.constexpr, PAGE_LEN: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, WIDTH: tl.constexpr, VALUE_START: tl.constexpr, BLOCK_G: tl.constexpr,
    TILES: tl.constexpr, BLOCK_K: tl.constexpr, MAIN: tl.constexpr, BLOCK_DK: tl.constexpr,
    REST: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGN: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, h, q_index, group = head_tile(index, heads, queries, BLOCK_G, TILES)

    key_columns = tl.arange(0, BLOCK_DK)
    # A value that is its key's first part is not loaded again.
    IN_KEY: tl.constexpr = VALUE_START == 0 and DV == MAIN and BLOCK_DV == BLOCK_DK
    value_columns = tl.arange(0, BLOCK_DV)
    query_heads = h * G + group
    q_rows = query + b * stride_q_b + query_heads[:, None] * stride_q_h + q_index * stride_q_q
    q = load_rows(q_rows + key_columns[None, :], group < G, key_columns, MAIN, BLOCK_DK, True)
    if REST:
        rest_columns = MAIN + tl.arange(0, REST)
        q_rest = load_rows(
            q_rows + rest_columns[None, :], group < G, rest_columns, DK, MAIN + REST, True
        )
    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q_index * stride_ids_q
    table_row = table + b * stride_table_b

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    first = split * split_len
    last = tl.minimum(first + split_len, count)
    for start in range(first, last, BLOCK_K):
        positions = start + tl.arange(0, BLOCK_K)
        ids, id_mask = load_ids(ids_row, positions, positions < last, stride_ids_k, tokens)
        place = (ids, id_mask, h // SHARE, table_row, page_address, stride_table)
        rows = row_pointers(*place, PAGE_LEN, WIDTH, ALIGN, DTYPE)
        key = load_rows(rows + key_columns[None, :], id_mask, key_columns, MAIN, BLOCK_DK, True)
        if IN_KEY:
            value = key
        else:
            value_at = rows + VALUE_START + value_columns[None, :]
            value = load_rows(value_at, id_mask, value_columns, DV, BLOCK_DV, True)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(key).to(DOT_DTYPE), input_precision="ieee")
        if REST:
            rest = load_rows(
                rows + rest_columns[None, :], id_mask, rest_columns, DK, MAIN + REST, True
            )
            rest = tl.trans(rest).to(DOT_DTYPE)
            dots = tl.dot(q_rest.to(DOT_DTYPE), rest, dots, input_precision="ieee")
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(id_mask[None, :], scores, float("-inf"))
        weights, shrink, peak, total = softmax_step(scores, peak, total)
        weights = weights.to(DTYPE).to(DOT_DTYPE)
        acc = tl.dot(weights, value.to(DOT_DTYPE), acc * shrink[:, None], input_precision="ieee")

    result, log_total = finish_softmax(acc, peak, total)
    row = (b * heads * G + query_heads) * queries + q_index
    if split == 0:
        # For the kernel that merges the chunks: nothing has to be launched for it.
        tl.store(tickets + row, tl.zeros([BLOCK_G], tl.int32), mask=group < G)
    target = row * tl.num_programs(1) + split
    tl.store(
        out + target[:, None] * DV + value_columns[None, :],
        result,
        mask=(group < G)[:, None] & (value_columns < DV)[None, :],
    )
    tl.store(lse + target, log_total, mask=group < G)


def gather_partials(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
    splits: int | None = None,
) -> Partials:
    """See ``hf_kvret_kernels.gather_attention.gather_partials``.

    ``splits`` is the number of chunks the ids are cut into, None for as many as fill the device.
    """
    batch, query_heads, queries, _ = query.shape
    heads, count = ids.shape[1], ids.shape[3]
    group = query_heads // heads
    tile = tile_heads(group, rows.value_dim)
    tiles = triton.cdiv(group, tile)
    programs = batch * heads * tiles * queries
    block_k = tile_keys(rows.key_dim, rows.value_dim, query.dtype)
    splits, split_len = split_plan(
        count, block_k, programs, query.device, waves=_WAVES, most=_MOST_SPLITS, splits=splits
    )
    partials = Partials(*partial_buffers(query, splits, rows.value_dim))
    if not programs:
        return partials
    _attend_kernel[(programs, splits)](
        query,
        ids,
        rows.table,
        rows.addresses(),
        partials.outs,
        partials.lses,
        partials.tickets,
        *query.stride()[:3],
        *selection_numbers(ids, rows),
        split_len,
        *score_factors(scale, softcap, LOG2_E),
        DV=rows.value_dim,
        VALUE_START=rows.value_start,
        BLOCK_K=block_k,
        BLOCK_DV=max(16, triton.next_power_of_2(rows.value_dim)),
        num_stages=3,
        **_constants(query, rows, ids, tile, softcap),
    )
    return partials


def _constants(
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, tile: int, softcap: float | None
) -> dict[str, Any]:
    """What both kernels are compiled for; a program takes ``tile`` query heads."""
    heads, keys = ids.shape[1], Columns.of(rows.key_dim)
    group = query.shape[1] // heads
    return {
        "G": group,
        "SHARE": heads // rows.heads,
        "PAGE_LEN": rows.page_len,
        "DK": rows.key_dim,
        "WIDTH": rows.width,
        "BLOCK_G": tile,
        "TILES": triton.cdiv(group, tile),
        "MAIN": keys.main,
        "BLOCK_DK": keys.block,
        "REST": keys.rest,
        "ALIGN": rows.alignment_bytes(),
        "SOFTCAP": softcap is not None,
        "DTYPE": TL_DTYPES[rows.dtype],
        "DOT_DTYPE": dot_dtype(rows.dtype),
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def tile_keys(key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile. In fp32, which has no tensor cores, larger tiles spill registers."""
    columns = sum(max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    return 16 if dtype == torch.float32 and columns > 128 else 32


@triton.jit(do_not_specialize=["heads", "queries", "count", "tokens", "blocks", *CHANGING_STRIDES])
def _scores_kernel(
    query, ids_ptr, table, page_address, scores_ptr,
    stride_q_b, stride_q_h, stride_q_q, stride_ids_b, stride_ids_h, stride_ids_q, stride_ids_k,
    stride_table_b, stride_table,
    heads, queries, count, tokens, blocks, inner, outer,
    G: tl.constexpr, SHARE: tl.constexpr, PAGE_LEN: tl.constexpr, DK: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_G: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_DK: tl.constexpr, REST: tl.constexpr, ALIGN: tl.constexpr,
    SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """A block of the ids of one selection, with all query heads that share it."""
    index = (tl.program_id(0) // blocks).to(tl.int64)
    positions = (tl.program_id(0) % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    b, h, q_index, group = head_tile(index, heads, queries, BLOCK_G, TILES)

    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q_index * stride_ids_q
    inside = positions < count
    ids, id_mask = load_ids(ids_row, positions, inside, stride_ids_k, tokens)
    table_row = table + b * stride_table_b
    place = (ids, id_mask, h // SHARE, table_row, page_address, stride_table)
    rows = row_pointers(*place, PAGE_LEN, WIDTH, ALIGN, DTYPE)
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
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """See ``hf_kvret_kernels.gather_attention.gather_scores``."""
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
    columns = max(16, triton.next_power_of_2(rows.key_dim))
    block_k = max(16, min(_MOST_KEYS, _TILE_BYTES // (columns * query.element_size())))
    blocks = triton.cdiv(count, block_k)
    _scores_kernel[(batch * heads * tiles * queries * blocks,)](
        query,
        ids,
        rows.table,
        rows.addresses(),
        scores,
        *query.stride()[:3],
        *selection_numbers(ids, rows),
        blocks,
        *score_factors(scale, softcap),
        BLOCK_K=block_k,
        **_constants(query, rows, ids, tile, softcap),
    )
    return scores
