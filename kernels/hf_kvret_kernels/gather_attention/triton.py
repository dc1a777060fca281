"""Attention over chosen rows in Triton: the ids of a query are split over several programs.

A program takes one selection (a batch row, a selecting head, a query) and a chunk of its ids,
follows them through the page table to rows in device or pinned host memory, and attends with all
query heads that share the selection. The chunks are merged by whoever needs them merged.

With the variant "gather" a kernel that does nothing else copies the rows to the device first, all
loads of a program under way at once; attention then reads them one after the other, the next ones
while it computes. Both variants do the same sums in the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import tuning
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
    selection_index,
    softmax_step,
    split_plan,
    tile_heads,
)
from hf_kvret_kernels.gather_attention import VARIANTS
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.tuning import Tunable, dtype_name, power_of_two


@triton.jit(
    do_not_specialize=["heads", "queries", "count", "tokens", "split_len", *CHANGING_STRIDES]
)
def _attend_kernel(
    query,
    ids_ptr,
    table,
    page_address,
    row_copy,
    out,
    lse,
    tickets,
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
    split_len,
    inner,
    outer,
    G: tl.constexpr,
    SHARE: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_START: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    USE_COPY: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
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
        # A copy has zeros for holes, so its loads don't wait for ids and can be made ahead.
        if USE_COPY:
            rows = (row_copy + (index * count + positions) * WIDTH)[:, None]
            rows = tl.multiple_of(rows, (ALIGN, ALIGN))
            load_mask = positions < last
        else:
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
            load_mask = id_mask
        key = load_rows(rows + key_columns[None, :], load_mask, key_columns, MAIN, BLOCK_DK, True)
        if IN_KEY:
            value = key
        else:
            value_at = rows + VALUE_START + value_columns[None, :]
            value = load_rows(value_at, load_mask, value_columns, DV, BLOCK_DV, True)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(key).to(DOT_DTYPE), input_precision="ieee")
        if REST:
            rest = load_rows(
                rows + rest_columns[None, :], load_mask, rest_columns, DK, MAIN + REST, True
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
    variant: str = "auto",
    choice: GatherChoice | None = None,
) -> Partials:
    """See ``hf_kvret_kernels.gather_attention.gather_partials``.

    ``splits`` is the number of chunks the ids are cut into, None for as many as fill the device;
    ``choice`` how to launch, None for what was measured or the rule.
    """
    batch, query_heads, queries, _ = query.shape
    heads, count = ids.shape[1], ids.shape[3]
    if choice is None:
        size = size_of(query, rows, ids)
        choice = tuning.choice(CHOICES, size, rule(size), query.device)
    if variant != "auto":
        choice = replace(choice, variant=variant)
    group = query_heads // heads
    tile = tile_heads(group, rows.value_dim)
    tiles = triton.cdiv(group, tile)
    programs = batch * heads * tiles * queries
    splits, split_len = split_plan(
        count,
        choice.block_k,
        programs,
        query.device,
        waves=choice.waves,
        most=choice.most_splits,
        splits=splits,
    )
    partials = Partials(*partial_buffers(query, splits, rows.value_dim))
    if not programs:
        return partials
    gather = choice.variant == "gather"
    # A kernel argument must be some pointer; with rows where they lie it is never read.
    row_copy = copy_rows(rows, ids, choice.copy_rows, choice.warps) if gather else query
    inner, outer = score_factors(scale, softcap, LOG2_E)
    keys = Columns.of(rows.key_dim)
    _attend_kernel[(programs, splits)](
        query,
        ids,
        rows.table,
        rows.addresses(),
        row_copy,
        partials.outs,
        partials.lses,
        partials.tickets,
        *query.stride()[:3],
        *ids.stride(),
        *rows.table.stride(),
        heads,
        queries,
        count,
        rows.token_count,
        split_len,
        inner,
        outer,
        G=group,
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        DK=rows.key_dim,
        DV=rows.value_dim,
        WIDTH=rows.width,
        VALUE_START=rows.value_start,
        BLOCK_G=tile,
        TILES=tiles,
        BLOCK_K=choice.block_k,
        MAIN=keys.main,
        BLOCK_DK=keys.block,
        REST=keys.rest,
        BLOCK_DV=max(16, triton.next_power_of_2(rows.value_dim)),
        ALIGN=rows.alignment_bytes(),
        SOFTCAP=softcap is not None,
        USE_COPY=gather,
        DTYPE=TL_DTYPES[rows.dtype],
        DOT_DTYPE=dot_dtype(rows.dtype),
        num_warps=choice.warps,
        num_stages=choice.stages,
        enable_fp_fusion=True,
    )
    return partials


class GatherSize(NamedTuple):
    """Calls that share a choice.

    Attributes:
        dtype: of rows and query, as ``"bfloat16"``.
        key_dim, value_dim: Dk and Dv.
        group: query heads that share a selection.
        selections: B * H * Q, rounded up to a power of two.
        chosen: K, rounded up to a power of two.
        rows: ``"device"``, or ``"host"`` where some lie there.
    """

    dtype: str
    key_dim: int
    value_dim: int
    group: int
    selections: int
    chosen: int
    rows: str


@dataclass(frozen=True)
class GatherChoice:
    """How ``gather_attention`` is launched.

    Attributes:
        variant: ``"direct"``, the attention kernel follows ids to the rows where they lie;
            ``"gather"``, one kernel copies the rows to the device, another attends to the copy.
        copy_rows: rows that a program of the copying kernel asks for at once.
        block_k: rows of a tile.
        warps, stages: of a program, and of its pipeline.
        waves: programs per multiprocessor to aim at, by cutting selections into chunks.
        most_splits: chunks of a selection, at most.
    """

    variant: str
    copy_rows: int
    block_k: int
    warps: int
    stages: int
    waves: int
    most_splits: int


CHOICES = Tunable(
    name="gather_attention",
    version=1,
    size=GatherSize,
    kind=GatherChoice,
    space={
        "variant": VARIANTS,
        "copy_rows": (8, 16, 32, 64),
        "block_k": (16, 32, 64, 128),
        "warps": (2, 4, 8),
        # From 5 on, loads of rows are made a tile ahead: ids, table and addresses come before them.
        "stages": (1, 2, 3, 4, 5, 6),
        "waves": (1, 2, 4, 8, 16),
        "most_splits": (16, 32, 64, 128),
    },
    only={"copy_rows": ("variant", "gather")},
)


def size_of(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor) -> GatherSize:
    """The size class of a call."""
    batch, heads, queries, count = ids.shape
    return GatherSize(
        dtype_name(query.dtype),
        rows.key_dim,
        rows.value_dim,
        query.shape[1] // heads,
        power_of_two(batch * heads * queries),
        power_of_two(count),
        "device" if all(chunk.device == query.device for chunk in rows.chunks) else "host",
    )


@cache
def rule(size: GatherSize) -> GatherChoice:
    """What is taken where nothing was measured; not measured itself.

    Programs are many, because loads have a long way: several must be under way. In fp32, which has
    no tensor cores, larger tiles spill registers. Rows are read where they lie, also over the bus:
    a copy reads the same bytes there, and then writes and reads them once more.
    """
    columns = sum(max(16, power_of_two(dim)) for dim in (size.key_dim, size.value_dim))
    block_k = 16 if size.dtype == "float32" and columns > 128 else 32
    return GatherChoice("direct", 32, block_k, warps=4, stages=3, waves=4, most_splits=64)


@triton.jit(do_not_specialize=["heads", "queries", "count", "tokens", *CHANGING_STRIDES])
def _copy_kernel(
    ids_ptr,
    table,
    page_address,
    row_copy,
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
    SHARE: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b, h, q_index = selection_index(index, heads, queries)
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
    targets = row_copy + (index * count + positions) * WIDTH
    targets = tl.multiple_of(targets[:, None], (ALIGN, ALIGN))
    columns = tl.arange(0, BLOCK_WIDTH)
    real = (columns < WIDTH)[None, :]
    tile = tl.load(rows + columns[None, :], mask=id_mask[:, None] & real, other=0.0)
    tl.store(targets + columns[None, :], tile, mask=inside[:, None] & real)


def copy_rows(rows: PagedRows, ids: torch.Tensor, block: int, warps: int) -> torch.Tensor:
    """``[B, H, Q, K, Dk + Dv]`` of the rows' dtype, on the device of ``ids [B, H, Q, K]``.

    Rows of holes are zero. ``block`` rows are a program's, of ``warps`` warps.
    """
    batch, heads, queries, count = ids.shape
    row_copy = torch.empty(*ids.shape, rows.width, dtype=rows.dtype, device=ids.device)
    if row_copy.numel() == 0:
        return row_copy
    _copy_kernel[(batch * heads * queries, triton.cdiv(count, block))](
        ids,
        rows.table,
        rows.addresses(),
        row_copy,
        *ids.stride(),
        *rows.table.stride(),
        heads,
        queries,
        count,
        rows.token_count,
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        WIDTH=rows.width,
        BLOCK_K=block,
        BLOCK_WIDTH=triton.next_power_of_2(rows.width),
        ALIGN=rows.alignment_bytes(),
        DTYPE=TL_DTYPES[rows.dtype],
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return row_copy
