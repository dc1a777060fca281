"""Attention of a tile of query rows to a piece of the keys, which several Triton kernels do.

The G query heads of a group are folded into the rows of a tile, row ``q * G + g``, so keys and
values are read once per kv head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import finite_base
from hf_kvret_kernels._triton_shared import capped_scores, load_rows, softmax_step


@triton.jit
def _load_rest(
    rows,
    row_mask,
    DK: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """``[rows, REST]``: what of ``rows [rows, 1]`` of DK numbers comes after the first MAIN."""
    columns = tl.arange(0, REST)
    return load_rows(rows + MAIN + columns[None, :], row_mask, columns, DK - MAIN, REST, MASK_ROWS)


@triton.jit
def _visit_keys(
    acc,
    peak,
    total,
    q,
    q_rest,
    q_index,
    key,
    value,
    valid,
    first,
    last,
    causal_offset,
    inner,
    outer,
    STRIDES: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    REST: tl.constexpr,
    IN_KEY: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Keys ``first .. last`` into the running softmax; unless MASKED, all rows see all of them.

    Args:
        STRIDES: of the tokens of key, value and valid, a tuple.
        MAIN, BLOCK_DK, REST: ``Columns`` of a key, whose parts ``q`` and ``q_rest`` are.
        IN_KEY: values are the first parts of keys.
    """
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    k_rows = key + rows[:, None] * STRIDES[0] + key_columns[None, :]
    v_rows = value + rows[:, None] * STRIDES[1] + value_columns[None, :]
    valid_rows = valid + rows * STRIDES[2]
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < last
        place = tl.cast(start, tl.int64)
        if VALID:
            inside = inside & (tl.load(valid_rows + place * STRIDES[2], mask=inside, other=0) != 0)
        k_place = k_rows + place * STRIDES[0]
        k = load_rows(k_place, inside, key_columns, MAIN, BLOCK_DK, MASKED)
        if IN_KEY:
            v = k
        else:
            v = load_rows(v_rows + place * STRIDES[1], inside, value_columns, DV, BLOCK_DV, MASKED)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
        if REST:
            rest = key + (place + rows[:, None]) * STRIDES[0]
            rest = _load_rest(rest, inside, DK, MAIN, REST, MASKED)
            rest = tl.trans(rest).to(DOT_DTYPE)
            dots = tl.dot(q_rest.to(DOT_DTYPE), rest, dots, input_precision="ieee")
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        if MASKED:
            score_mask = inside[None, :]
            if CAUSAL:
                score_mask = score_mask & (tokens[None, :] <= causal_offset + q_index[:, None])
            scores = tl.where(score_mask, scores, float("-inf"))
        weights, shrink, peak, total = softmax_step(scores, peak, total)
        weights = weights.to(DTYPE).to(DOT_DTYPE)
        acc = tl.dot(weights, v.to(DOT_DTYPE), acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def _visit_once(
    q_rows,
    real,
    q_index,
    key,
    value,
    valid,
    first,
    last,
    causal_offset,
    inner,
    outer,
    STRIDES: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    REST: tl.constexpr,
    IN_KEY: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Keys ``first .. last``, at most BLOCK_N, into a new running softmax.

    All loads are under way before one is waited for, so none goes by the mask.
    """
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    tokens = first + tl.arange(0, BLOCK_N)
    inside = tokens < last
    seen = inside
    place = tl.cast(first, tl.int64)
    q = load_rows(q_rows + key_columns[None, :], real, key_columns, MAIN, BLOCK_DK, False)
    if not IN_KEY:
        v_rows = value + place * STRIDES[1] + rows[:, None] * STRIDES[1] + value_columns[None, :]
        v = load_rows(v_rows, inside, value_columns, DV, BLOCK_DV, True)
    if VALID:
        seen &= tl.load(valid + place * STRIDES[2] + rows * STRIDES[2], mask=inside, other=0) != 0
    k_rows = key + place * STRIDES[0] + rows[:, None] * STRIDES[0]
    k = load_rows(k_rows + key_columns[None, :], inside, key_columns, MAIN, BLOCK_DK, True)
    if REST:
        q_rest = _load_rest(q_rows, real, DK, MAIN, REST, False)
        rest = _load_rest(k_rows, inside, DK, MAIN, REST, True)
    if IN_KEY:
        v = k
    # Rows that are not real read the last query: a load with a mask is waited for where it stands.
    q = tl.where(real[:, None], q, 0.0)
    if VALID:
        # A weight of 0 does not make nothing of NaN.
        v = tl.where(seen[:, None], v, 0.0)
    dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
    if REST:
        q_rest = tl.where(real[:, None], q_rest, 0.0).to(DOT_DTYPE)
        dots = tl.dot(q_rest, tl.trans(rest).to(DOT_DTYPE), dots, input_precision="ieee")
    scores = capped_scores(dots, inner, outer, SOFTCAP)
    score_mask = seen[None, :]
    if CAUSAL:
        score_mask = score_mask & (tokens[None, :] <= causal_offset + q_index[:, None])
    scores = tl.where(score_mask, scores, float("-inf"))
    peak = tl.max(scores, 1)
    weights = tl.exp2(scores - finite_base(peak)[:, None])
    total = tl.sum(weights, 1)
    weights = weights.to(DTYPE).to(DOT_DTYPE)
    return tl.dot(weights, v.to(DOT_DTYPE), input_precision="ieee"), peak, total


@triton.jit
def attend_tile(
    query,
    key,
    value,
    valid,
    strides,
    b,
    h,
    block,
    split,
    queries,
    tokens,
    causal_offset,
    split_len,
    inner,
    outer,
    STRIDES: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    REST: tl.constexpr,
    IN_KEY: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ONCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The running softmax of a tile of query rows over a piece of the keys.

    ``(acc [BLOCK_M, BLOCK_DV], peak [BLOCK_M], total [BLOCK_M])``, for ``finish_softmax``.

    Args:
        strides: of query ``(b, h, q)``, key and value ``(b, h)`` and valid ``(b)``, a tuple.
        b, h: batch row and KV head, int64.
        block, split: numbers of the tile and of the piece.
        STRIDES: of the tokens of key, value and valid, a tuple.
        ONCE: a piece is no longer than BLOCK_N.
    """
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_index = rows // G
    query_heads = h * G + rows % G
    real = q_index < queries
    key_columns = tl.arange(0, BLOCK_DK)
    q_rows = query + b * strides[0] + query_heads * strides[1]
    q_rows += tl.minimum(q_index, queries - 1).to(tl.int64) * strides[2]
    q_rows = q_rows[:, None]

    first = split * split_len
    last = tl.minimum(first + split_len, tokens)
    all_see = last
    if CAUSAL:
        newest = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, queries - 1)
        last = tl.minimum(last, causal_offset + newest + 1)
        all_see = tl.minimum(last, causal_offset + (block * BLOCK_M) // G + 1)
    keys = key + b * strides[3] + h * strides[4]
    values = value + b * strides[5] + h * strides[6]
    validity = valid + b * strides[7]
    if ONCE:
        acc, peak, total = _visit_once(
            q_rows, real, q_index, keys, values, validity, first, last, causal_offset, inner, outer,
            STRIDES, DK, DV, BLOCK_N, MAIN, BLOCK_DK, REST, IN_KEY, BLOCK_DV, CAUSAL, VALID,
            SOFTCAP,
            DTYPE, DOT_DTYPE,
        )  # fmt: skip
    else:
        q = load_rows(q_rows + key_columns[None, :], real, key_columns, MAIN, BLOCK_DK, True)
        q_rest = q
        if REST:
            q_rest = _load_rest(q_rows, real, DK, MAIN, REST, True)
        masked_from = first
        if not VALID:
            masked_from = first + tl.maximum(all_see - first, 0) // BLOCK_N * BLOCK_N
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if not VALID:
            acc, peak, total = _visit_keys(
                acc, peak, total, q, q_rest, q_index, keys, values, validity,
                first, masked_from, causal_offset, inner, outer, STRIDES, DK, DV,
                BLOCK_N, MAIN, BLOCK_DK, REST, IN_KEY, BLOCK_DV, CAUSAL, VALID, SOFTCAP, False,
                DTYPE, DOT_DTYPE,
            )  # fmt: skip
        acc, peak, total = _visit_keys(
            acc, peak, total, q, q_rest, q_index, keys, values, validity,
            masked_from, last, causal_offset, inner, outer, STRIDES, DK, DV,
            BLOCK_N, MAIN, BLOCK_DK, REST, IN_KEY, BLOCK_DV, CAUSAL, VALID, SOFTCAP, True, DTYPE,
            DOT_DTYPE,
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def query_places(block, b, h, heads, queries, G: tl.constexpr, ROWS: tl.constexpr):
    """Places ``[ROWS]`` int64 in ``[B, Hq, Q]`` of a tile's query rows, and which there are."""
    rows = block * ROWS + tl.arange(0, ROWS)
    q_index = rows // G
    return (b * heads * G + h * G + rows % G) * queries + q_index, q_index < queries
