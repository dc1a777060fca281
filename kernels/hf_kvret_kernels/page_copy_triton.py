"""Copying whole pages by address, in the largest words that all of them are multiples of.

The tokens of one head in one page lie side by side, and so do they in the result: a block of
``page_len * (Dk + Dv)`` numbers that is copied as it is. Programs take tiles of blocks in turn, so
that any number of them can do the work.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_rows import selection_place
from hf_kvret_kernels.paged import PagedRows

# Bytes that a program has under way at once: a bus needs many, to hide how far the host is.
_TILE_BYTES = 16_384
_WORDS = {4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16), 1: (torch.int8, tl.int8)}


@triton.jit(do_not_specialize=["stride_table_b", "first", "columns", "work"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    table,
    page_address,
    out,
    stride_table_b,
    stride_table,
    heads,
    first,
    columns,
    work,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    tiles = tl.cdiv(WORDS, TILE)
    offsets = tl.arange(0, TILE)
    for index in range(tl.program_id(0), work, tl.num_programs(0)):
        block = index // tiles
        inside = (index % tiles) * TILE + offsets
        row, head, column = selection_place(block, heads, columns)
        table_row = table + row.to(tl.int64) * stride_table_b
        page = tl.load(table_row + (first + column).to(tl.int64) * stride_table)
        address = tl.load(page_address + page).to(tl.pointer_type(DTYPE))
        source = address + head.to(tl.int64) * WORDS + inside
        source = tl.max_contiguous(tl.multiple_of(source, ALIGN), TILE)
        words = tl.load(source, mask=inside < WORDS, other=0)
        tl.store(out + block.to(tl.int64) * WORDS + inside, words, mask=inside < WORDS)


def copy_pages(rows: PagedRows, first: int, last: int, programs: int | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.page_copy.copy_pages``, which checks the arguments."""
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
