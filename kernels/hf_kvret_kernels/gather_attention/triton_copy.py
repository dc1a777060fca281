"""Chosen rows into a dense buffer on the device: a Triton kernel that only moves bytes.

A program asks for a block of whole rows at once, so that as many loads are under way as it has
registers for; nothing waits for a product in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_rows import (
    CHANGING_STRIDES,
    load_ids,
    row_pointers,
    selection_place,
)
from hf_kvret_kernels._triton_shared import TL_DTYPES
from hf_kvret_kernels.paged import PagedRows


@triton.jit(do_not_specialize=["heads", "queries", "count", "tokens", *CHANGING_STRIDES])
def _copy_kernel(  # type: ignore[no-untyped-def]
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
    b, h, q_index = selection_place(index, heads, queries)
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
