"""What stands for the tokens that are not selected, in the kernel that ends a step.

``mean_tokens`` says what it is. The programs of a tile share the products of its queries with the
moments, and the counts of ids; the last of them makes a chunk of these.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import LN_2, capped_scores, merge_some
from hf_kvret_kernels.mean_tokens import LEAST_SPREAD

# A program multiplies so many rows of the moments at once, and adds so many counts.
_ROWS_AT_ONCE, _COUNTS_AT_ONCE = tl.constexpr(16), tl.constexpr(16)
# A program counts so many ids of a query at once.
_IDS_AT_ONCE = tl.constexpr(256)
_LEAST_SPREAD = tl.constexpr(LEAST_SPREAD)
_ROOT_HALF, _INVERSE_ROOT_TAU = tl.constexpr(0.5**0.5), tl.constexpr(0.3989422804014327)


@triton.jit
def _load_queries(q_rows, row_mask, first, DK: tl.constexpr, BLOCK: tl.constexpr):
    """``[ROWS, BLOCK]`` fp32 of the queries at ``q_rows [ROWS, 1]``: numbers from ``first`` on."""
    columns = first + tl.arange(0, BLOCK)[None, :]
    mask = row_mask[:, None] & (columns < DK)
    return tl.load(q_rows + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def query_pointers(query, strides, b, h, block, G: tl.constexpr, ROWS: tl.constexpr):
    """Pointers ``[ROWS, 1]`` to a tile's query rows; ``strides`` of ``(b, h, q)``, a tuple."""
    rows = block * ROWS + tl.arange(0, ROWS)
    at = b * strides[0] + (h * G + rows % G) * strides[1] + (rows // G).to(tl.int64) * strides[2]
    return query + at[:, None]


@triton.jit
def share_products(
    q_rows, moments, along, rows, row_mask, split, splits,
    ROWS: tl.constexpr, DK: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The share of a program in the products of its queries with ``moments [OUTPUTS, DK]``."""
    share = tl.cdiv(OUTPUTS, splits)
    last = tl.minimum((split + 1) * share, OUTPUTS)
    targets = along + rows[:, None] * (OUTPUTS + splits)
    for start in range(split * share, last, _ROWS_AT_ONCE):
        numbers = start + tl.arange(0, _ROWS_AT_ONCE)
        products = tl.zeros([ROWS, _ROWS_AT_ONCE], tl.float32)
        for first in range(0, DK, BLOCK):
            columns = first + tl.arange(0, BLOCK)[None, :]
            part = tl.load(
                moments + numbers[:, None] * DK + columns,
                mask=(numbers < last)[:, None] & (columns < DK),
                other=0.0,
            )
            q = _load_queries(q_rows, row_mask, first, DK, BLOCK)
            products = tl.dot(q, tl.trans(part), products, input_precision="ieee")
        mask = row_mask[:, None] & (numbers < last)[None, :]
        tl.store(targets + numbers[None, :], products, mask=mask)


@triton.jit
def share_counts(
    ids_ptr, along, rows, row_mask, b, h, block, split, splits, heads, queries, count,
    G: tl.constexpr, BY_GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """The share of a program in counting the ids of ``rows [ROWS]`` that are not -1.

    BY_GROUP: the query heads of a KV head share their ``count`` ids.
    """
    selections = rows
    if BY_GROUP:
        q_index = (block * ROWS + tl.arange(0, ROWS)) // G
        selections = (b * heads + h) * queries + q_index
    share = tl.cdiv(count, splits)
    last = tl.minimum((split + 1) * share, count)
    found = tl.zeros([ROWS, _IDS_AT_ONCE], tl.int32)
    for start in range(split * share, last, _IDS_AT_ONCE):
        numbers = start + tl.arange(0, _IDS_AT_ONCE)
        ids = tl.load(
            ids_ptr + selections[:, None] * count + numbers[None, :],
            mask=row_mask[:, None] & (numbers < last)[None, :],
            other=-1,
        )
        found += (ids >= 0).to(tl.int32)
    counts = tl.sum(found, axis=1).to(tl.float32)
    tl.store(along + rows * (OUTPUTS + splits) + OUTPUTS + split, counts, mask=row_mask)


@triton.jit
def merge_mean(
    q_rows, along, value, count, rows, row_mask, splits, inner, outer, peak, mass, total,
    ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The mean token of ``rows [ROWS]``, whose queries are at ``q_rows``, into a running merge.

    ``value`` and ``count`` are pointers to the mean value, and to the number of tokens.
    """
    at, real = along + rows[:, None] * (OUTPUTS + splits), row_mask[:, None]
    score = tl.load(at, mask=real, other=0.0, cache_modifier=".cg")
    variance = tl.zeros([ROWS, 1], tl.float32)
    for first in range(0, DK, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        mask = real & (columns < DK)
        to_keys = tl.load(at + 1 + columns, mask=mask, other=0.0, cache_modifier=".cg")
        q = _load_queries(q_rows, row_mask, first, DK, BLOCK)
        variance += tl.sum(to_keys * q, axis=1)[:, None]
    columns = tl.arange(0, BLOCK_DV)[None, :]
    value_mask = columns < DV
    to_values = tl.load(
        at + 1 + DK + columns, mask=real & value_mask, other=0.0, cache_modifier=".cg"
    )
    selected = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, splits, _COUNTS_AT_ONCE):
        programs = start + tl.arange(0, _COUNTS_AT_ONCE)[None, :]
        mask = real & (programs < splits)
        some = tl.load(at + OUTPUTS + programs, mask=mask, other=0.0, cache_modifier=".cg")
        selected += tl.sum(some, axis=1)[:, None]

    # Scores of the kernel are in powers of 2.
    score = capped_scores(score, inner, outer, SOFTCAP) * LN_2
    gain = tl.zeros([ROWS, 1], tl.float32) + inner * LN_2
    if SOFTCAP:
        level = score / (outer * LN_2)
        gain = gain * outer * (1.0 - level * level)
    variance = tl.maximum(variance * gain * gain, 0.0)
    spread = tl.sqrt(variance)
    tokens = tl.load(count).to(tl.float32)
    share = selected / tl.maximum(tokens, 1.0)
    log_below, ratio = _normal_below(_quantile_above(share) - spread)
    left_out = (share < 1.0) & (tokens > 0.0)
    log = score + variance * 0.5 + tl.log(tl.maximum(tokens, 1.0)) + log_below
    mean = tl.load(value + columns, mask=value_mask, other=0.0)
    mean += (1.0 - ratio / tl.maximum(spread, _LEAST_SPREAD)) * to_values * gain
    log = tl.where(left_out, log, float("-inf"))
    mean = tl.where(left_out, mean, 0.0)
    return merge_some(log[None, :, :], mean[None, :, :], peak, mass, total)


@triton.jit
def _normal_below(x):
    """``(log Phi(x), phi(x) / Phi(x))`` of the normal distribution, to some 1e-6 of each."""
    root = tl.abs(x) * _ROOT_HALF
    t = 1.0 / (1.0 + 0.5 * root)
    # It is a polynomial that was fitted to log(erfcx(root) / t).
    p = 0.170872878
    p = p * t - 0.822152257
    p = p * t + 1.48851586
    p = p * t - 1.13520396
    p = p * t + 0.278868079
    p = p * t - 0.186288059
    p = p * t + 0.0967841893
    p = p * t + 0.374091953
    p = p * t + 1.000023723
    p = p * t - 1.265512228
    scaled = 0.5 * t * tl.exp(p)
    density = tl.exp(-root * root)
    near = 1.0 - density * scaled
    log = tl.where(x < 0.0, tl.log(scaled) - root * root, tl.log(near))
    return log, _INVERSE_ROOT_TAU * tl.where(x < 0.0, 1.0 / scaled, density / near)


@triton.jit
def _quantile_above(share):
    """The number that a share of a normal distribution is above; a huge one for 0."""
    tail = tl.minimum(share, 1.0 - share)
    log_tail = tl.log(tl.maximum(tail, 1e-30))
    # Newton's method comes from below.
    x = -tl.sqrt(-2.0 * log_tail)
    for _ in tl.static_range(4):
        log, ratio = _normal_below(x)
        x -= (log - log_tail) / ratio
    x = tl.where(tail > 0.0, x, -1e15)
    return tl.where(share > 0.5, x, -x)
