"""Attention over rows of a store and over a dense window, as ``bench kernels`` measures them.

Coded rows are as ``store="higgs"`` has them: with its default of bits, in groups of a head, and in
the dtype of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from kernel_inputs import PAGE_LEN, Draw, KernelShape, coded
from kernel_work import (
    ATTENTION_ERRORS,
    SCORE_ERROR,
    KernelOp,
    distance,
    unequal,
)

from hf_kvret_kernels import higgs
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention


def _window(shape: KernelShape, draw: Draw) -> Any:
    return partial(
        prompt_attention,
        draw.query(shape),
        draw.keys(shape),
        draw.keys(shape),
        scale=shape.scale,
        causal_offset=shape.length - 1,
        valid=draw.all_valid(shape),
        out_dtype=torch.float32,
    )


def _decode(shape: KernelShape, draw: Draw) -> Any:
    parts = _draw_coded(shape, draw, (shape.batch, shape.heads, shape.length), 1)
    return partial(coded(shape).decode, *parts, shape.dtype)


def _attend_coded(shape: KernelShape, draw: Draw) -> Any:
    codec, dim, table = coded(shape), shape.head_dim, draw.pages(shape)
    parts = _draw_coded(shape, draw, (table.numel(), shape.heads, PAGE_LEN), 2)
    rows = PagedRows([torch.cat(parts, dim=-1)], table, 2 * codec.code_bytes(dim), apart=True)
    query, ids = draw.query(shape), draw.ids(shape, shape.top_k)
    attend = partial(higgs.attend, query, rows, ids, codec, scale=shape.scale)
    return partial(attend, key_dim=dim, value_dim=dim)


def _draw_coded(
    shape: KernelShape, draw: Draw, lead: tuple[int, ...], parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of ``parts`` vectors a row: the cost does not depend on them."""
    codec, dim = coded(shape), shape.head_dim
    codes = draw.integers(256, *lead, parts * codec.code_bytes(dim), dtype=torch.uint8)
    scales = draw.normal(*lead, parts * codec.scale_bytes(dim) // 2, dtype=torch.float16)
    return codes, scales.abs().view(torch.uint8)


HIGGS_OPS = (
    # Keys, or values, to codes and scales, as a flush does. The transform is additions, and a
    # nearest point can be found without a product for each point, so no multiply-adds count.
    KernelOp(
        name="higgs.encode",
        read="B H n D x",
        written="B H n coded",
        inputs=lambda shape, draw: partial(coded(shape).encode, draw.keys(shape)),
        # Pairs nearly half-way between two points go to either; scales are rounded to fp16.
        check=(unequal, 1e-2),
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    # Codes and scales to vectors, as exact attention over a second prompt does.
    KernelOp(
        name="higgs.decode",
        read="B H n coded",
        written="B H n D x",
        inputs=_decode,
        # Both are rounded to the vectors' dtype.
        check=(distance, ATTENTION_ERRORS),
        sizes="{bits} bits, groups of {together}",
        copies=16,
    ),
    # As gather_attention, over coded rows.
    KernelOp(
        name="higgs.attend",
        read="B H K i32 + 2 B H K coded + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        inputs=_attend_coded,
        # Scaled grid points are rounded to the query's dtype too.
        check=(distance, {dtype: 2 * error for dtype, error in ATTENTION_ERRORS.items()}),
        sizes="{K:,} rows, {bits} bits, groups of {together}",
        stored="2 B H n coded",
        copies=64,
    ),
)
ATTENTION_OPS = (
    # Attention of a step's query over k chosen rows of each KV head: an output and a log-sum. Rows
    # are read once for a group; the page table is left out.
    KernelOp(
        name="gather_attention",
        read="B H K i32 + 2 B H K D x + B Hq D x",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq K D",
        inputs=lambda s, draw: partial(gather_attention, *draw.chosen_rows(s), scale=s.scale),
        check=(distance, ATTENTION_ERRORS),
        sizes="{K:,} rows",
        stored="2 B H n D x",
        compiled=True,
    ),
    # Exact scores of k chosen keys of each KV head; values between the keys don't count.
    KernelOp(
        name="gather_scores",
        read="B H K i32 + B H K D x + B Hq D x",
        written="B Hq K f32",
        products="B Hq K D",
        inputs=lambda s, draw: partial(gather_scores, *draw.chosen_rows(s), scale=s.scale),
        check=(distance, SCORE_ERROR),
        sizes="{K:,} rows",
        stored="2 B H n D x",
        compiled=True,
    ),
    # A decode step's query over a dense window of all tokens, masked; the output is to be merged.
    KernelOp(
        name="prompt_attention",
        read="2 B H n D x + B Hq D x + B n",
        written="B Hq D f32 + B Hq f32",
        products="2 B Hq n D",
        inputs=_window,
        check=(distance, ATTENTION_ERRORS),
    ),
)
