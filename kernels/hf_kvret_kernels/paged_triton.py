"""Reading paged rows in Triton kernels, by address: in device or pinned host memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import TL_DTYPES
from hf_kvret_kernels.paged import PagedRows

# Coded rows are bytes.
_ROW_DTYPES = {**TL_DTYPES, torch.uint8: tl.uint8}

# Arguments that follow the number of tokens held, or of ids.
_IDS = ("stride_ids_b", "stride_ids_h", "stride_ids_q", "stride_table_b")
_CHANGING = ("heads", "queries", "count", *_IDS)


@triton.jit
def row_pointers(  # type: ignore[no-untyped-def]
    ids,
    wanted,
    kv_head,
    table,
    stride_table,
    page_address,
    PAGE_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Pointers ``[K]`` to the rows that ``ids [K]`` name; meaningless outside ``wanted``.

    ``table`` points to the batch row's first entry, ``stride_table`` is the step between entries.
    """
    page = tl.load(table + (ids // PAGE_LEN) * stride_table, mask=wanted, other=0)
    address = tl.load(page_address + page, mask=wanted, other=0)
    slot = (kv_head * PAGE_LEN + ids % PAGE_LEN).to(tl.int64)
    return address.to(tl.pointer_type(DTYPE)) + slot * WIDTH


@triton.jit(do_not_specialize=_CHANGING)
def _gather_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    table,
    page_address,
    keys,
    values,
    stride_ids_b,
    stride_ids_h,
    stride_ids_q,
    stride_ids_k,
    stride_table_b,
    stride_table,
    heads,
    queries,
    count,
    SHARE: tl.constexpr,
    PAGE_LEN: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    q = index % queries
    h = (index // queries) % heads
    b = index // (queries * heads)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q * stride_ids_q
    ids = tl.load(ids_row + columns * stride_ids_k, mask=columns < count, other=-1)
    wanted = ids >= 0
    rows = row_pointers(
        ids,
        wanted,
        h // SHARE,
        table + b * stride_table_b,
        stride_table,
        page_address,
        PAGE_LEN,
        DK + DV,
        DTYPE,
    )
    rows = tl.multiple_of(rows[:, None], (ALIGN, ALIGN))
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    key_mask = wanted[:, None] & (key_columns < DK)[None, :]
    value_mask = wanted[:, None] & (value_columns < DV)[None, :]
    key = tl.load(rows + key_columns[None, :], mask=key_mask, other=0.0)
    value = tl.load(rows + DK + value_columns[None, :], mask=value_mask, other=0.0)
    target = (index * count + columns)[:, None]
    inside = (columns < count)[:, None]
    tl.store(
        keys + target * DK + key_columns[None, :], key, mask=inside & (key_columns < DK)[None, :]
    )
    tl.store(
        values + target * DV + value_columns[None, :],
        value,
        mask=inside & (value_columns < DV)[None, :],
    )


def gather_rows(rows: PagedRows, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``PagedRows.gather`` with Triton; arguments are checked there."""
    batch, heads, queries, count = ids.shape
    keys = torch.empty(*ids.shape, rows.key_dim, dtype=rows.dtype, device=ids.device)
    values = torch.empty(*ids.shape, rows.value_dim, dtype=rows.dtype, device=ids.device)
    if ids.numel() == 0:
        return keys, values
    block = 32
    _gather_kernel[(batch * heads * queries, triton.cdiv(count, block))](
        ids,
        rows.table,
        rows.addresses(),
        keys,
        values,
        *ids.stride(),
        *rows.table.stride(),
        heads,
        queries,
        count,
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        DK=rows.key_dim,
        DV=rows.value_dim,
        BLOCK_K=block,
        BLOCK_DK=triton.next_power_of_2(rows.key_dim),
        BLOCK_DV=triton.next_power_of_2(rows.value_dim),
        ALIGN=rows.alignment_bytes(),
        DTYPE=_ROW_DTYPES[rows.dtype],
    )
    return keys, values
