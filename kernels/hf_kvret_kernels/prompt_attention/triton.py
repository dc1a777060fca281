"""Block-wise attention in Triton, after FlashAttention-2 (Dao 2023).

Where queries are few, the keys are split over several programs, and their chunks are merged by
another kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    TL_DTYPES,
    Columns,
    capped_scores,
    device_limits,
    dot_dtype,
    finish_softmax,
    finite_base,
    load_rows,
    mask_bytes,
    mask_strides,
    score_factors,
    softmax_step,
    split_plan,
)
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.merge.triton import merge_partials


@triton.jit(do_not_specialize=["queries", "tokens", "causal_offset", "split_len"])
def _attend_kernel(
    query, key, value, valid, out, lse, strides, heads, queries, tokens, causal_offset, split_len,
    inner, outer,
    STRIDES: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAIN: tl.constexpr, BLOCK_DK: tl.constexpr,
    REST: tl.constexpr, IN_KEY: tl.constexpr, BLOCK_DV: tl.constexpr, ONCE: tl.constexpr,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    # With causal attention the last rows have the most to do: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    split = tl.program_id(2)
    acc, peak, total = attend_tile(
        query, key, value, valid, strides, b, h, block, split, queries, tokens, causal_offset,
        split_len, inner, outer, STRIDES, G, DK, DV, BLOCK_M, BLOCK_N, MAIN, BLOCK_DK, REST,
        IN_KEY, BLOCK_DV,
        ONCE, CAUSAL, VALID, SOFTCAP, DTYPE, DOT_DTYPE,
    )  # fmt: skip
    result, log_total = finish_softmax(acc, peak, total)
    targets, real = query_indices(block, b, h, heads, queries, G, BLOCK_M)
    targets = targets * tl.num_programs(2) + split
    value_columns = tl.arange(0, BLOCK_DV)
    tl.store(
        out + targets[:, None] * DV + value_columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (value_columns < DV)[None, :],
    )
    tl.store(lse + targets, log_total, mask=real)


def rule_for(query: torch.Tensor, value: torch.Tensor) -> PromptChoice:
    """How a call with these is launched."""
    _, shared_bytes = device_limits(query.device)
    return rule(*_tile_sizes(query, value), shared_bytes)


def _tile_sizes(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    """Query rows of a KV head, columns of K plus V in a tile, bytes of a number."""
    rows = query.shape[2] * (query.shape[1] // value.shape[1])
    keys = Columns.of(query.shape[3])
    columns = keys.block + keys.rest + max(16, triton.next_power_of_2(value.shape[3]))
    return rows, columns, query.element_size()


class TilePlan(NamedTuple):
    """How tiles of query rows and chunks of the keys are shared out.

    Attributes:
        rows: query rows of a tile.
        row_blocks: tiles of a batch row and KV head.
        splits, split_len: chunks, and keys of one.
        choice: all else.
    """

    rows: int
    row_blocks: int
    splits: int
    split_len: int
    choice: PromptChoice


def tile_plan(
    query: torch.Tensor,
    value: torch.Tensor,
    splits: int | None = None,
    choice: PromptChoice | None = None,
    tokens: int | None = None,
) -> TilePlan:
    """The plan of a call; ``splits`` and ``choice`` as of ``prompt_attention``.

    ``tokens`` are those of ``value``, or others where a plan for these is asked for.
    """
    batch, heads, held, _ = value.shape
    tokens = held if tokens is None else tokens
    rows, columns, itemsize = _tile_sizes(query, value)
    if choice is None:
        choice = rule_for(query, value)
    block_m = tile_rows(rows, columns, itemsize)
    row_blocks = triton.cdiv(rows, block_m)
    splits, split_len = split_plan(
        tokens,
        choice.block_n,
        row_blocks * batch * heads,
        query.device,
        waves=choice.waves,
        most=choice.most_splits,
        least_len=choice.least_split_len,
        splits=splits,
    )
    return TilePlan(block_m, row_blocks, splits, split_len, choice)


def tile_numbers(plan: TilePlan, call: DenseCall) -> tuple[Any, ...]:
    """What kernels of tiles take from ``strides`` to ``outer``."""
    query, key, value, scale, causal_offset, valid, softcap = call
    strides = *query.stride()[:3], *key.stride()[:2], *value.stride()[:2], mask_strides(valid)[0]
    return (
        strides,
        value.shape[1],
        query.shape[2],
        value.shape[2],
        0 if causal_offset is None else causal_offset,
        plan.split_len,
        *score_factors(scale, softcap, LOG2_E),
    )


def tile_constants(plan: TilePlan, call: DenseCall) -> dict[str, Any]:
    """What kernels of tiles are compiled for, and how they are launched."""
    query, key, value, valid = call.query, call.key, call.value, call.valid
    key_dim, value_dim = query.shape[3], value.shape[3]
    keys = Columns.of(key_dim)
    # A chunk that is no longer than a tile needs no pipeline.
    once = plan.split_len <= plan.choice.block_n
    return {
        # Strides between tokens depend on the layout of the rows, not on the length.
        "STRIDES": (key.stride(2), value.stride(2), mask_strides(valid)[1]),
        "G": query.shape[1] // value.shape[1],
        "DK": key_dim,
        "DV": value_dim,
        "BLOCK_M": plan.rows,
        "BLOCK_N": plan.choice.block_n,
        "MAIN": keys.main,
        "BLOCK_DK": keys.block,
        "REST": keys.rest,
        # Values that are their keys' first part are not loaded again. On meta all addresses are 0.
        "IN_KEY": value.data_ptr() == key.data_ptr() != 0
        and value.stride() == key.stride()
        and value_dim == keys.main == keys.block,
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "ONCE": once,
        "CAUSAL": call.causal_offset is not None,
        "VALID": valid is not None,
        "SOFTCAP": call.softcap is not None,
        "DTYPE": TL_DTYPES[query.dtype],
        "DOT_DTYPE": dot_dtype(query.dtype),
        "num_warps": plan.choice.warps,
        "num_stages": 1 if once else plan.choice.stages,
        "enable_fp_fusion": True,
    }


def prompt_attention(
    call: DenseCall,
    out_dtype: torch.dtype,
    splits: int | None = None,
    choice: PromptChoice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.prompt_attention.prompt_attention``.

    ``splits`` is the number of chunks the keys are cut into, None for as many as fill the device;
    ``choice`` how to launch, None for the rule.
    """
    partials = prompt_partials(call, out_dtype, splits, choice)
    if partials.lses.shape[3] == 1:
        return partials.outs.squeeze(3), partials.lses.squeeze(3)
    return merge_partials([partials.outs], [partials.lses], None, out_dtype)


def prompt_partials(
    call: DenseCall,
    single_dtype: torch.dtype = torch.float32,
    splits: int | None = None,
    choice: PromptChoice | None = None,
) -> Partials:
    """See ``hf_kvret_kernels.prompt_attention.prompt_partials``.

    ``single_dtype`` is that of ``outs`` where there is one chunk; more are fp32. The rest as of
    ``prompt_attention``.
    """
    query, value = call.query, call.value
    plan = tile_plan(query, value, splits, choice)
    shape = *query.shape[:3], plan.splits
    dtype = single_dtype if plan.splits == 1 else torch.float32
    outs = torch.empty(*shape, value.shape[3], dtype=dtype, device=query.device)
    lses = torch.empty(shape, dtype=torch.float32, device=query.device)
    if lses.numel():
        grid = plan.row_blocks, value.shape[0] * value.shape[1], plan.splits
        _attend_kernel[grid](
            query,
            call.key,
            value,
            mask_bytes(call.valid, query),
            outs,
            lses,
            *tile_numbers(plan, call),
            **tile_constants(plan, call),
        )
    return Partials(outs, lses)


@dataclass(frozen=True)
class PromptChoice:
    """How ``prompt_attention`` is launched; ``tile_rows`` gives the query rows of a tile.

    Attributes:
        block_n: keys of a tile.
        warps, stages: of a program, and of its pipeline.
        waves: programs per multiprocessor to aim at, by cutting the keys into chunks.
        most_splits: chunks, at most.
        least_split_len: keys of a chunk, at least: it must be worth its share of the merge.
    """

    block_n: int
    warps: int
    stages: int
    waves: int
    most_splits: int
    least_split_len: int


def tile_rows(rows: int, columns: int, itemsize: int) -> int:
    """Query rows of a tile, for ``rows`` of them and K plus V of ``columns`` columns."""
    widest, most = (128, 64) if itemsize == 4 else (256, 128)
    if columns > widest:
        most //= 2
    if columns > 2 * widest:
        # Sums of values take the registers.
        most = 16
    return min(most, max(16, triton.next_power_of_2(rows)))


# Query rows of a KV head for which fewer warps are enough.
_FEW_ROWS = 64


@cache
def rule(rows: int, columns: int, itemsize: int, shared_bytes: int) -> PromptChoice:
    """How a call is launched; not measured. Arguments as in ``tile_rows``.

    In 16 bits, 128 x 64 with 8 warps suits heads of 128 (a query tile of 32 KiB, 32 KiB a stage).
    fp32 has no tensor cores, registers are what it lacks. The number of stages is what fits into
    ``shared_bytes`` of shared memory.
    """
    if itemsize == 4:
        block_n, warps, most_stages = (32, 8, 2) if columns <= 128 else (16, 8, 2)
    else:
        block_n, warps, most_stages = (64, 8, 3) if columns <= 256 else (32, 4, 3)
        if rows <= _FEW_ROWS:
            warps = 4
        if columns > 256 and (columns != 512 or rows > 32):
            # Parts of keys, values of 512, tiles of 64 rows: with fewer warps registers spill.
            warps = 8
        if columns == 1024:
            # With a third stage registers spill, too.
            most_stages = 2
    row_bytes = columns * itemsize
    room = shared_bytes - tile_rows(rows, columns, itemsize) * row_bytes // 2
    stages = max(1, min(most_stages, room // (block_n * row_bytes)))
    return PromptChoice(block_n, warps, stages, waves=1, most_splits=64, least_split_len=64)


@triton.jit
def _load_rest(
    rows, row_mask,
    DK: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """``[rows, REST]``: what of ``rows [rows, 1]`` of DK numbers comes after the first MAIN."""
    columns = tl.arange(0, REST)
    return load_rows(rows + MAIN + columns[None, :], row_mask, columns, DK - MAIN, REST, MASK_ROWS)


@triton.jit
def _visit_keys(
    acc, peak, total, q, q_rest, q_index, key, value, valid, first, last, causal_offset, inner,
    outer,
    STRIDES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_DK: tl.constexpr, REST: tl.constexpr, IN_KEY: tl.constexpr,
    BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
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
        offset = tl.cast(start, tl.int64)
        if VALID:
            inside = inside & (tl.load(valid_rows + offset * STRIDES[2], mask=inside, other=0) != 0)
        k_address = k_rows + offset * STRIDES[0]
        k = load_rows(k_address, inside, key_columns, MAIN, BLOCK_DK, MASKED)
        if IN_KEY:
            v = k
        else:
            v = load_rows(v_rows + offset * STRIDES[1], inside, value_columns, DV, BLOCK_DV, MASKED)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
        if REST:
            rest = key + (offset + rows[:, None]) * STRIDES[0]
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
    q_rows, real, q_index, key, value, valid, first, last, causal_offset, inner, outer,
    STRIDES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_DK: tl.constexpr, REST: tl.constexpr, IN_KEY: tl.constexpr,
    BLOCK_DV: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys ``first .. last``, at most BLOCK_N, into a new running softmax.

    All loads are under way before one is waited for, so none goes by the mask.
    """
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)
    tokens = first + tl.arange(0, BLOCK_N)
    inside = tokens < last
    seen = inside
    offset = tl.cast(first, tl.int64)
    q = load_rows(q_rows + key_columns[None, :], real, key_columns, MAIN, BLOCK_DK, False)
    if not IN_KEY:
        v_rows = value + offset * STRIDES[1] + rows[:, None] * STRIDES[1] + value_columns[None, :]
        v = load_rows(v_rows, inside, value_columns, DV, BLOCK_DV, True)
    if VALID:
        seen &= tl.load(valid + offset * STRIDES[2] + rows * STRIDES[2], mask=inside, other=0) != 0
    k_rows = key + offset * STRIDES[0] + rows[:, None] * STRIDES[0]
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
    query, key, value, valid, strides, b, h, block, split, queries, tokens, causal_offset,
    split_len, inner, outer,
    STRIDES: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAIN: tl.constexpr, BLOCK_DK: tl.constexpr,
    REST: tl.constexpr, IN_KEY: tl.constexpr, BLOCK_DV: tl.constexpr, ONCE: tl.constexpr,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The running softmax of a tile of query rows over a chunk of the keys.

    ``(acc [BLOCK_M, BLOCK_DV], peak [BLOCK_M], total [BLOCK_M])``, for ``finish_softmax``.

    Args:
        strides: of query ``(b, h, q)``, key and value ``(b, h)`` and valid ``(b)``, a tuple.
        b, h: batch row and KV head, int64.
        block, split: numbers of the tile and of the chunk.
        STRIDES: of the tokens of key, value and valid, a tuple.
        ONCE: a chunk is no longer than BLOCK_N.
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
def query_indices(block, b, h, heads, queries, G: tl.constexpr, ROWS: tl.constexpr):
    """Indices ``[ROWS]`` int64 in ``[B, Hq, Q]`` of a tile's query rows, and which there are."""
    rows = block * ROWS + tl.arange(0, ROWS)
    q_index = rows // G
    return (b * heads * G + h * G + rows % G) * queries + q_index, q_index < queries
