"""Reading paged rows in Triton kernels, by address: in device or pinned host memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    CHANGING_STRIDES,
    TL_DTYPES,
    load_ids,
    row_pointers,
    selection_index,
    selection_numbers,
    side_pointers,
)

# Coded rows are bytes.
_ROW_DTYPES = {**TL_DTYPES, torch.uint8: tl.uint8}


@triton.jit(do_not_specialize=["heads", "queries", "count", "tokens", *CHANGING_STRIDES])
def _gather_kernel(
    ids_ptr, table, page_address, keys, values,
    stride_ids_b, stride_ids_h, stride_ids_q, stride_ids_k, stride_table_b, stride_table,
    heads, queries, count, tokens,
    SHARE: tl.constexpr, PAGE_LEN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_START: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr, APART: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    b, h, q = selection_index(index, heads, queries)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q * stride_ids_q
    inside = columns < count
    ids, id_mask = load_ids(ids_row, columns, inside, stride_ids_k, tokens)
    table_row = table + b * stride_table_b
    place = (ids, id_mask, h // SHARE, table_row, page_address, stride_table)
    if APART:
        keys_at, values_at = side_pointers(*place, PAGE_LEN, DK, DV, ALIGN, VALUE_ALIGN, DTYPE)
    else:
        keys_at = row_pointers(*place, PAGE_LEN, WIDTH, ALIGN, DTYPE)
        values_at = keys_at + VALUE_START
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    key_mask = id_mask[:, None] & (key_columns < DK)[None, :]
    value_mask = id_mask[:, None] & (value_columns < DV)[None, :]
    key = tl.load(keys_at + key_columns[None, :], mask=key_mask, other=0.0)
    value = tl.load(values_at + value_columns[None, :], mask=value_mask, other=0.0)
    target = (index * count + columns)[:, None]
    tl.store(
        keys + target * DK + key_columns[None, :],
        key,
        mask=inside[:, None] & (key_columns < DK)[None, :],
    )
    tl.store(
        values + target * DV + value_columns[None, :],
        value,
        mask=inside[:, None] & (value_columns < DV)[None, :],
    )


def gather_rows(rows: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``PagedRows.gather`` of ``rows`` with Triton; that method checks the arguments."""
    batch, heads, queries, count = ids.shape
    keys = torch.empty(*ids.shape, rows.key_dim, dtype=rows.dtype, device=ids.device)
    values = torch.empty(*ids.shape, rows.value_dim, dtype=rows.dtype, device=ids.device)
    if ids.numel() == 0:
        return keys, values
    block = 32
    aligned = rows.alignment_bytes()
    aligns = rows.side_alignments() if rows.apart else (aligned, aligned)
    _gather_kernel[(batch * heads * queries, triton.cdiv(count, block))](
        ids,
        rows.table,
        rows.addresses(),
        keys,
        values,
        *selection_numbers(ids, rows),
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        DK=rows.key_dim,
        DV=rows.value_dim,
        WIDTH=rows.width,
        VALUE_START=rows.value_start,
        BLOCK_K=block,
        BLOCK_DK=triton.next_power_of_2(rows.key_dim),
        BLOCK_DV=triton.next_power_of_2(rows.value_dim),
        ALIGN=aligns[0],
        VALUE_ALIGN=aligns[1],
        APART=rows.apart,
        DTYPE=_ROW_DTYPES[rows.dtype],
        enable_fp_fusion=True,
    )
    return keys, values


# Bytes that a program has under way at once: a bus needs many, to hide how far the host is.
_TILE_BYTES = 16_384
_WORDS = {4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16), 1: (torch.int8, tl.int8)}


@triton.jit(do_not_specialize=["stride_table_b", "first", "columns", "work"])
def _copy_kernel(
    table, page_address, out,
    stride_table_b, stride_table,
    heads, first, columns, work,
    WORDS: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(WORDS, TILE)
    offsets = tl.arange(0, TILE)
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        block = index // tiles
        inside = (index % tiles) * TILE + offsets
        row, head, column = selection_index(block, heads, columns)
        table_row = table + row.to(tl.int64) * stride_table_b
        page = tl.load(table_row + (first + column).to(tl.int64) * stride_table)
        address = tl.load(page_address + page).to(tl.pointer_type(DTYPE))
        source = address + head.to(tl.int64) * WORDS + inside
        source = tl.max_contiguous(tl.multiple_of(source, ALIGN), TILE)
        words = tl.load(source, mask=inside < WORDS, other=0)
        tl.store(out + block.to(tl.int64) * WORDS + inside, words, mask=inside < WORDS)


def copy_pages(rows: Any, first: int, last: int, programs: int | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.paged.copy_pages``, which checks the arguments."""
    batch, columns = rows.table.shape[0], last - first
    shape = (batch, rows.heads, columns * rows.page_len, rows.width)
    out = torch.empty(shape, dtype=rows.dtype, device=rows.table.device)
    block_bytes = rows.page_len * rows.width * out.element_size()
    align = math.gcd(16, block_bytes, *(chunk.data_ptr() for chunk in rows.chunks))
    word_bytes = min(4, align)
    words = block_bytes // word_bytes
    torch_dtype, dtype = _WORDS[word_bytes]
    tile = min(_TILE_BYTES // word_bytes, triton.next_power_of_2(words))
    work = batch * rows.heads * columns * triton.cdiv(words, tile)
    _copy_kernel[(min(work, programs or work),)](
        rows.table,
        rows.addresses(),
        out.view(-1).view(torch_dtype),
        *rows.table.stride(),
        rows.heads,
        first,
        columns,
        work,
        WORDS=words,
        TILE=tile,
        ALIGN=align,
        DTYPE=dtype,
        enable_fp_fusion=True,
    )
    return out
