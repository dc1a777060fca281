"""Attention over coded rows in Triton: the ids of a query are split over several programs.

As in ``gather_attention``, a program takes one selection and a chunk of its ids; chunks stay
unmerged, for whoever attends to more. Rows are unpacked in registers and stay transformed: the
queries of the program are transformed once, and so is what it summed up. Products have rows, and
then dims, for their rows: query heads are few, and tensor cores pad columns to 8 but rows to 16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

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
    score_factors,
    selection_numbers,
    side_pointers,
    softmax_step,
    split_plan,
    tile_heads,
)
from hf_kvret_kernels.higgs.coded_rows import CodedRows
from hf_kvret_kernels.higgs.naive import WORDS, grid_words
from hf_kvret_kernels.higgs.triton_codes import load_numbers, load_side, transform_groups
from hf_kvret_kernels.merge import Partials

# Programs per multiprocessor to aim at: the loads have a long way, so several must be under way.
_WAVES = 4
_MOST_SPLITS = 64
# Columns of products, which tensor cores pad to 8: with fewer than 4 nothing becomes less.
_FEWEST_HEADS = 4


@triton.jit(
    do_not_specialize=["heads", "queries", "count", "tokens", "split_len", *CHANGING_STRIDES]
)
def _attend_kernel(
    query, ids_ptr, table, page_address, signs_ptr, grid_ptr, mean_ptr, out, lse, tickets,
    stride_q_b, stride_q_h, stride_q_q, stride_ids_b, stride_ids_h, stride_ids_q, stride_ids_k,
    stride_table_b, stride_table,
    heads, queries, count, tokens, split_len, inner, outer, factor,
    G: tl.constexpr, SHARE: tl.constexpr, PAGE_LEN: tl.constexpr, KEY_BYTES: tl.constexpr,
    VALUE_BYTES: tl.constexpr, KEY_GROUPS: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr, PLANES: tl.constexpr, PAIR: tl.constexpr,
    ONE_GROUP: tl.constexpr, BLOCK_G: tl.constexpr, TILES: tl.constexpr, BLOCK_K: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_KEY: tl.constexpr, REST: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    CODE_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_MEAN: tl.constexpr, DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """MAIN to BLOCK_VALUE count groups; KEY_BYTES and VALUE_BYTES are those of codes.

    With VALUE_IN_KEY the codes of a value are among those of its key.
    """
    DK: tl.constexpr = KEY_GROUPS * GROUP
    MAIN_DK: tl.constexpr = MAIN * GROUP
    DV: tl.constexpr = VALUE_GROUPS * GROUP
    BLOCK_DK: tl.constexpr = BLOCK_KEY * GROUP
    BLOCK_DV: tl.constexpr = BLOCK_VALUE * GROUP
    SCALE_BYTES: tl.constexpr = 2
    VALUE_CODES: tl.constexpr = 0 if VALUE_IN_KEY else KEY_BYTES
    VALUE_SCALES: tl.constexpr = 0 if VALUE_IN_KEY else KEY_GROUPS * SCALE_BYTES
    CODES: tl.constexpr = KEY_BYTES if VALUE_IN_KEY else KEY_BYTES + VALUE_BYTES
    SCALES: tl.constexpr = SCALE_BYTES * (KEY_GROUPS if VALUE_IN_KEY else KEY_GROUPS + VALUE_GROUPS)
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    b, h, q_index, group = head_tile(index, heads, queries, BLOCK_G, TILES)

    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    query_heads = h * G + group
    q_rows = query + b * stride_q_b + query_heads[:, None] * stride_q_h + q_index * stride_q_q
    q = load_rows(q_rows + key_columns[None, :], group < G, key_columns, MAIN_DK, BLOCK_DK, True)
    mean_scores = tl.zeros([BLOCK_G], tl.float32)
    mean_row = mean_ptr + (b * (heads // SHARE) + h // SHARE) * DK
    if HAS_MEAN:
        mean = tl.load(mean_row + key_columns, mask=key_columns < MAIN_DK, other=0.0)
        mean_scores = tl.sum(q.to(tl.float32) * mean[None, :], 1)
    signs = tl.load(signs_ptr + key_columns % GROUP)[None, :]
    q = transform_groups(
        q.to(tl.float32), signs, factor, BLOCK_G, BLOCK_KEY, GROUP, LOG_GROUP, False
    )
    q = tl.trans(q.to(DTYPE).to(DOT_DTYPE))
    if REST:
        columns = tl.arange(0, REST * GROUP)
        q_rest = q_rows + MAIN_DK + columns[None, :]
        q_rest = load_rows(q_rest, group < G, columns, DK - MAIN_DK, REST * GROUP, True)
        if HAS_MEAN:
            mean = tl.load(mean_row + MAIN_DK + columns, mask=columns < DK - MAIN_DK, other=0.0)
            mean_scores += tl.sum(q_rest.to(tl.float32) * mean[None, :], 1)
        signs = tl.load(signs_ptr + columns % GROUP)[None, :]
        q_rest = q_rest.to(tl.float32)
        q_rest = transform_groups(q_rest, signs, factor, BLOCK_G, REST, GROUP, LOG_GROUP, False)
        q_rest = tl.trans(q_rest.to(DTYPE).to(DOT_DTYPE))
    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h + q_index * stride_ids_q
    table_row = table + b * stride_table_b

    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_G], tl.float32)
    first = split * split_len
    last = tl.minimum(first + split_len, count)
    for start in range(first, last, BLOCK_K):
        positions = start + tl.arange(0, BLOCK_K)
        ids, id_mask = load_ids(ids_row, positions, positions < last, stride_ids_k, tokens)
        place = (ids, id_mask, h // SHARE, table_row, page_address, stride_table)
        codes, scales = side_pointers(
            *place, PAGE_LEN, CODES, SCALES, CODE_ALIGN, SCALE_ALIGN, tl.uint8
        )
        key, key_factors = load_side(
            *(codes, scales, id_mask, grid_ptr, KEY_BYTES, MAIN, GROUP, BLOCK_K, BLOCK_KEY),
            *(CODE_BITS, PER_WORD, PLANES, SCALE_ALIGN % 2 == 0, PAIR, ONE_GROUP),
        )
        key = key.to(DTYPE).to(DOT_DTYPE)
        dots = tl.dot(key, q, input_precision="ieee")
        if REST:
            rest = load_numbers(
                codes + MAIN_DK // (2 * PER_WORD),
                scales + MAIN * SCALE_BYTES,
                *(id_mask, KEY_BYTES // PLANES, grid_ptr, KEY_GROUPS - MAIN, GROUP, BLOCK_K, REST),
                *(CODE_BITS, PER_WORD, PLANES, SCALE_ALIGN % 2 == 0),
            )
            rest = rest.to(DTYPE).to(DOT_DTYPE)
            dots = tl.dot(rest, q_rest, dots, input_precision="ieee")
        dots = tl.trans(dots) * key_factors
        if HAS_MEAN:
            dots += mean_scores[:, None]
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(id_mask[None, :], scores, float("-inf"))
        weights, shrink, peak, total = softmax_step(scores, peak, total)
        if VALUE_IN_KEY and VALUE_GROUPS == MAIN and BLOCK_VALUE == BLOCK_KEY:
            value, value_factors = key, key_factors
        else:
            value, value_factors = load_side(
                *(codes + VALUE_CODES, scales + VALUE_SCALES, id_mask, grid_ptr),
                # From one plane of codes to the next.
                KEY_BYTES if VALUE_IN_KEY else VALUE_BYTES,
                *(VALUE_GROUPS, GROUP, BLOCK_K, BLOCK_VALUE),
                *(CODE_BITS, PER_WORD, PLANES, SCALE_ALIGN % 2 == 0, PAIR, ONE_GROUP),
            )
            value = value.to(DTYPE).to(DOT_DTYPE)
        weights = (weights * value_factors).to(DTYPE).to(DOT_DTYPE)
        acc = acc * shrink[None, :]
        acc = tl.dot(tl.trans(value), tl.trans(weights), acc, input_precision="ieee")

    result, log_total = finish_softmax(tl.trans(acc), peak, total)
    signs = tl.load(signs_ptr + value_columns % GROUP)[None, :]
    result = transform_groups(result, signs, factor, BLOCK_G, BLOCK_VALUE, GROUP, LOG_GROUP, True)
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
    coded: CodedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None,
    splits: int | None = None,
) -> Partials:
    """See ``hf_kvret_kernels.gather_attention.gather_partials``.

    ``splits`` is the number of chunks the ids are cut into, None for as many as fill the device.
    """
    rows, codec, mean = coded.pages, coded.codec, coded.key_mean
    key_dim, value_dim = coded.key_dim, coded.value_dim
    batch, query_heads, queries, _ = query.shape
    heads, count = ids.shape[1], ids.shape[3]
    shared = query_heads // heads
    group = codec.group
    # A dot of tensor cores has at least 16 numbers.
    keys = Columns.of(key_dim)
    block_key = max(16 // group, triton.next_power_of_2(keys.main // group))
    block_value = max(16 // group, triton.next_power_of_2(value_dim // group))
    # fp32 has no tensor cores: larger tiles, or fewer warps, spill registers.
    full = query.dtype == torch.float32
    numbers = (block_key + block_value) * group
    wide = numbers > 512
    block_k = 16 if full or numbers > 256 else 32
    tile = max(_FEWEST_HEADS, min(triton.next_power_of_2(shared), tile_heads(shared, value_dim)))
    tiles = triton.cdiv(shared, tile)
    programs = batch * heads * tiles * queries
    splits, split_len = split_plan(
        count, block_k, programs, query.device, waves=_WAVES, most=_MOST_SPLITS, splits=splits
    )
    partials = Partials(*partial_buffers(query, splits, value_dim))
    if not programs:
        return partials
    per_word, planes = WORDS[codec.code_bits]
    code_align, scale_align = rows.side_alignments()
    one_group = block_key == block_value == 1
    pair = torch.bfloat16 if one_group and query.dtype == torch.bfloat16 else torch.float16
    signs, grid = codec.sign_tensor(query.device), grid_words(codec.bits, query.device, pair)
    _attend_kernel[(programs, splits)](
        query,
        ids,
        rows.table,
        rows.addresses(),
        signs,
        grid,
        # Any pointer will do where there is none.
        signs if mean is None else mean,
        partials.outs,
        partials.lses,
        partials.tickets,
        *query.stride()[:3],
        *selection_numbers(ids, rows),
        split_len,
        *score_factors(scale, softcap, LOG2_E),
        group**-0.5,
        G=shared,
        SHARE=heads // rows.heads,
        PAGE_LEN=rows.page_len,
        KEY_BYTES=codec.code_bytes(key_dim),
        VALUE_BYTES=codec.code_bytes(value_dim),
        KEY_GROUPS=key_dim // group,
        VALUE_GROUPS=value_dim // group,
        VALUE_IN_KEY=coded.value_in_key,
        GROUP=group,
        LOG_GROUP=group.bit_length() - 1,
        CODE_BITS=codec.code_bits,
        PER_WORD=per_word,
        PLANES=planes,
        PAIR=TL_DTYPES[pair],
        ONE_GROUP=one_group,
        BLOCK_G=tile,
        TILES=tiles,
        BLOCK_K=block_k,
        MAIN=keys.main // group,
        BLOCK_KEY=block_key,
        REST=keys.rest // group,
        BLOCK_VALUE=block_value,
        CODE_ALIGN=code_align,
        SCALE_ALIGN=scale_align,
        SOFTCAP=softcap is not None,
        HAS_MEAN=mean is not None,
        DTYPE=TL_DTYPES[query.dtype],
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=8 if full or wide else 4,
        # Loads are made tiles ahead where there are several; for one that would be instructions.
        num_stages=3 if split_len > block_k else 1,
        enable_fp_fusion=True,
    )
    return partials
