"""Block-wise attention in Triton, after FlashAttention-2 (Dao 2023).

Where queries are few, the keys are split over several programs, and their pieces are merged by
another kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import tuning
from hf_kvret_kernels._triton_masks import mask_bytes, mask_strides
from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    TL_DTYPES,
    Columns,
    device_limits,
    dot_dtype,
    finish_softmax,
    score_factors,
    split_plan,
)
from hf_kvret_kernels.merge import Pieces
from hf_kvret_kernels.merge.triton import merge_partials
from hf_kvret_kernels.prompt_attention import choices
from hf_kvret_kernels.prompt_attention.triton_tile import attend_tile, query_places


@triton.jit(do_not_specialize=["queries", "tokens", "causal_offset", "split_len"])
def _attend_kernel(
    query,
    key,
    value,
    valid,
    out,
    lse,
    strides,
    heads,
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
    targets, real = query_places(block, b, h, heads, queries, G, BLOCK_M)
    targets = targets * tl.num_programs(2) + split
    value_columns = tl.arange(0, BLOCK_DV)
    tl.store(
        out + targets[:, None] * DV + value_columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (value_columns < DV)[None, :],
    )
    tl.store(lse + targets, log_total, mask=real)


def rule_for(query: torch.Tensor, value: torch.Tensor) -> choices.PromptChoice:
    """How a call with these is launched where nothing was measured."""
    _, shared_bytes = device_limits(query.device)
    return choices.rule(*_tile_sizes(query, value), shared_bytes)


def _tile_sizes(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    """Query rows of a KV head, columns of K plus V in a tile, bytes of a number."""
    rows = query.shape[2] * (query.shape[1] // value.shape[1])
    keys = Columns.of(query.shape[3])
    columns = keys.block + keys.rest + max(16, triton.next_power_of_2(value.shape[3]))
    return rows, columns, query.element_size()


class TilePlan(NamedTuple):
    """How tiles of query rows and pieces of the keys are shared out.

    Attributes:
        rows: query rows of a tile.
        row_blocks: tiles of a batch row and KV head.
        splits, split_len: pieces, and keys of one.
        choice: all else.
    """

    rows: int
    row_blocks: int
    splits: int
    split_len: int
    choice: choices.PromptChoice


def tile_plan(
    query: torch.Tensor,
    value: torch.Tensor,
    masked: bool,
    splits: int | None = None,
    choice: choices.PromptChoice | None = None,
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
        if rows <= choices.FEW_ROWS:
            size = choices.size_of(query, value, masked, tokens)
            choice = tuning.choice(choices.CHOICES, size, choice, query.device)
    block_m = choices.tile_rows(rows, columns, itemsize)
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


def tile_numbers(
    plan: TilePlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
) -> tuple[Any, ...]:
    """What kernels of tiles take from ``strides`` to ``outer``."""
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


def tile_constants(
    plan: TilePlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
) -> dict[str, Any]:
    """What kernels of tiles are compiled for, and how they are launched."""
    key_dim, value_dim = query.shape[3], value.shape[3]
    keys = Columns.of(key_dim)
    # A piece that is no longer than a tile needs no pipeline.
    once = plan.split_len <= plan.choice.block_n
    return {
        # Of tokens: a row of numbers or of all heads, whatever the length.
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
        "CAUSAL": causal_offset is not None,
        "VALID": valid is not None,
        "SOFTCAP": softcap is not None,
        "DTYPE": TL_DTYPES[query.dtype],
        "DOT_DTYPE": dot_dtype(query.dtype),
        "num_warps": plan.choice.warps,
        "num_stages": 1 if once else plan.choice.stages,
        "enable_fp_fusion": True,
    }


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
    out_dtype: torch.dtype,
    splits: int | None = None,
    choice: choices.PromptChoice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.prompt_attention.prompt_attention``.

    ``splits`` is the number of pieces the keys are cut into, None for as many as fill the device;
    ``choice`` how to launch, None for what was measured or the rule.
    """
    given = query, key, value, scale, causal_offset, valid, softcap
    pieces = prompt_pieces(*given, out_dtype, splits, choice)
    if pieces.lses.shape[3] == 1:
        return pieces.outs.squeeze(3), pieces.lses.squeeze(3)
    return merge_partials([pieces.outs], [pieces.lses], None, out_dtype)


def prompt_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
    single_dtype: torch.dtype = torch.float32,
    splits: int | None = None,
    choice: choices.PromptChoice | None = None,
) -> Pieces:
    """See ``hf_kvret_kernels.prompt_attention.prompt_pieces``.

    ``single_dtype`` is that of ``outs`` where there is one piece; more are fp32. The rest as of
    ``prompt_attention``.
    """
    plan = tile_plan(query, value, valid is not None, splits, choice)
    shape = *query.shape[:3], plan.splits
    dtype = single_dtype if plan.splits == 1 else torch.float32
    outs = torch.empty(*shape, value.shape[3], dtype=dtype, device=query.device)
    lses = torch.empty(shape, dtype=torch.float32, device=query.device)
    if lses.numel():
        grid = plan.row_blocks, value.shape[0] * value.shape[1], plan.splits
        _attend_kernel[grid](
            query,
            key,
            value,
            mask_bytes(valid, query),
            outs,
            lses,
            *tile_numbers(plan, query, key, value, scale, causal_offset, valid, softcap),
            **tile_constants(plan, query, key, value, causal_offset, valid, softcap),
        )
    return Pieces(outs, lses)
