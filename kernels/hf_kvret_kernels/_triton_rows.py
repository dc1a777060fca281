"""From ids to the rows they name, which all Triton kernels of paged rows share.

Offsets are 64 bit: a number of an id or of a page fits into 32, its product with a stride may not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

# Arguments that follow the number of tokens held, or of ids: not to be specialized, since a compile
# for each class of them would come at some later flush.
CHANGING_STRIDES = ("stride_ids_b", "stride_ids_h", "stride_ids_q", "stride_table_b")


@triton.jit
def selection_place(index, heads, queries):
    """``(batch row, selecting head, query)`` of selection ``index`` of ``[B, H, Q]``."""
    return index // (queries * heads), (index // queries) % heads, index % queries


@triton.jit
def head_tile(index, heads, queries, TILE: tl.constexpr, TILES: tl.constexpr):
    """``(batch row, selecting head, query, places [TILE] in its group)`` of a program.

    Programs are ``[B, H, TILES, Q]``; the last tile may reach beyond the group.
    """
    b, part, q = selection_place(index, heads * TILES, queries)
    return b, part // TILES, q, (part % TILES).to(tl.int32) * TILE + tl.arange(0, TILE)


@triton.jit
def load_ids(ids_row, places, inside, stride, tokens):
    """Ids ``[K]`` at ``places [K]`` int32 of a row whose ids are ``stride`` apart, and a mask.

    The mask is False outside ``inside``, for -1, and for what is none of the ``tokens``: such ids
    are never to be followed. They come as uint32: one comparison then finds both ends.
    """
    ids = tl.load(ids_row + places.to(tl.int64) * stride, mask=inside, other=-1)
    ids = ids.to(tl.uint32, bitcast=True)
    return ids, ids < tokens.to(tl.uint32)


@triton.jit
def row_pointers(
    ids,
    id_mask,
    kv_head,
    table_row,
    page_address,
    stride_table,
    PAGE_LEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Pointers ``[K, 1]`` to the rows that ``ids [K]`` name; meaningless outside ``id_mask``.

    Args:
        ids, id_mask: of ``load_ids``.
        kv_head: int64.
        table_row: the page numbers of the batch row, ``stride_table`` apart.
        page_address: byte addresses, int64, of all pages ``[Hkv, PAGE_LEN, WIDTH]`` of DTYPE.
        ALIGN: see ``PagedRows.alignment_bytes``.
    """
    columns = (ids // PAGE_LEN).to(tl.int64)
    page = tl.load(table_row + columns * stride_table, mask=id_mask, other=0)
    address = tl.load(page_address + page, mask=id_mask, other=0)
    slot = kv_head * PAGE_LEN + ids % PAGE_LEN
    rows = address.to(tl.pointer_type(DTYPE)) + slot.to(tl.int64) * WIDTH
    return tl.multiple_of(rows[:, None], (ALIGN, ALIGN))


@triton.jit
def side_pointers(
    ids,
    id_mask,
    kv_head,
    table_row,
    page_address,
    stride_table,
    PAGE_LEN: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``row_pointers`` of rows whose sides lie apart: ``[K, 1]`` to keys, ``[K, 1]`` to values.

    KEY_ALIGN and VALUE_ALIGN are ``PagedRows.side_alignments``.
    """
    columns = (ids // PAGE_LEN).to(tl.int64)
    page = tl.load(table_row + columns * stride_table, mask=id_mask, other=0)
    address = tl.load(page_address + page, mask=id_mask, other=0)
    block = address.to(tl.pointer_type(DTYPE)) + kv_head * (PAGE_LEN * (DK + DV))
    slot = ids % PAGE_LEN
    keys, values = block + slot * DK, block + (PAGE_LEN * DK + slot * DV)
    keys = tl.multiple_of(keys[:, None], (KEY_ALIGN, KEY_ALIGN))
    return keys, tl.multiple_of(values[:, None], (VALUE_ALIGN, VALUE_ALIGN))
