"""Attention over rows of a store and over a dense window, as ``bench kernels`` measures them.

Coded rows are as ``store="higgs"`` has them: with its default of bits, in groups of a head, and in
the dtype of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_kvret.benchmark.kernels_inputs import PAGE_LEN, Draw, KernelShape
from hf_kvret.benchmark.kernels_work import (
    ATTENTION_ERRORS,
    FP32_BYTES,
    ID_BYTES,
    KernelOp,
    distance,
    unequal,
)
from hf_kvret.config import RetrievalConfig
from hf_kvret_kernels import higgs
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention

_BITS = RetrievalConfig.bits


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
    coded = _draw_coded(shape, draw, (shape.batch, shape.heads, shape.length), 1)
    return partial(_codec(shape).decode, *coded, shape.dtype)


def _attend_coded(shape: KernelShape, draw: Draw) -> Any:
    codec, dim, table = _codec(shape), shape.head_dim, draw.pages(shape)
    coded = _draw_coded(shape, draw, (table.numel(), shape.heads, PAGE_LEN), 2)
    rows = PagedRows([torch.cat(coded, dim=-1)], table, 2 * codec.code_bytes(dim))
    query, ids = draw.query(shape), draw.ids(shape, shape.top_k)
    sizes = {"key_dim": dim, "value_dim": dim, "scale": shape.scale}
    return partial(higgs.attend, query, rows, ids, codec, **sizes)


def _outputs(shape: KernelShape) -> int:
    """In fp32, to be merged, and a log-sum for each query head."""
    return shape.queries * (shape.head_dim + 1) * FP32_BYTES


def _codec(shape: KernelShape) -> higgs.HiggsCodec:
    """With the largest groups that a head is made of."""
    return higgs.HiggsCodec(_BITS, shape.head_dim & -shape.head_dim)


def _coding(shape: KernelShape) -> str:
    return f"{_BITS} bits, groups of {_codec(shape).group}"


def _coded(shape: KernelShape) -> int:
    """Bytes of the codes and scales of a vector of the head dim."""
    codec = _codec(shape)
    return codec.code_bytes(shape.head_dim) + codec.scale_bytes(shape.head_dim)


def _draw_coded(
    shape: KernelShape, draw: Draw, lead: tuple[int, ...], parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of ``parts`` vectors a row: the cost does not depend on them."""
    codec, dim = _codec(shape), shape.head_dim
    codes = draw.integers(256, *lead, parts * codec.code_bytes(dim), dtype=torch.uint8)
    scales = draw.normal(*lead, parts * codec.scale_bytes(dim) // 2, dtype=torch.float16)
    return codes, scales.abs().view(torch.uint8)


HIGGS_OPS = (
    # Keys, or values, to codes and scales, as a flush does. The transform is additions, and a
    # nearest point can be found without a product for each point, so no multiply-adds count.
    KernelOp(
        name="higgs.encode",
        read=lambda s: s.vectors(s.tokens),
        written=lambda s: s.tokens * _coded(s),
        inputs=lambda s, draw: partial(_codec(s).encode, draw.keys(s)),
        # Pairs nearly half-way between two points go to either; scales are rounded to fp16.
        check=(unequal, 1e-2),
        sizes=_coding,
        copies=16,
    ),
    # Codes and scales to vectors, as exact attention over a second prompt does.
    KernelOp(
        name="higgs.decode",
        read=lambda s: s.tokens * _coded(s),
        written=lambda s: s.vectors(s.tokens),
        inputs=_decode,
        # Both are rounded to the vectors' dtype.
        check=(distance, ATTENTION_ERRORS),
        sizes=_coding,
        copies=16,
    ),
    # Attention of a step's query over k chosen coded rows of each KV head; without the page table.
    KernelOp(
        name="higgs.attend",
        read=lambda s: s.selected * (ID_BYTES + 2 * _coded(s)) + s.vectors(s.queries),
        written=_outputs,
        products=lambda s: 2 * s.selected * s.group * s.head_dim,
        inputs=_attend_coded,
        # Scaled grid points are rounded to the query's dtype too.
        check=(distance, {dtype: 2 * error for dtype, error in ATTENTION_ERRORS.items()}),
        sizes=lambda s: f"{s.top_k:,} rows, {_coding(s)}",
        # All rows of the store.
        stored=lambda s: 2 * s.tokens * _coded(s),
        copies=64,
    ),
)
ATTENTION_OPS = (
    # Attention of a step's query over k chosen rows of each KV head. Rows are read once for a
    # group; the page table is left out.
    KernelOp(
        name="gather_attention",
        # Ids, keys and values of the chosen rows, the query.
        read=lambda s: s.selected * ID_BYTES + s.vectors(2 * s.selected + s.queries),
        written=_outputs,
        # Two for each number of a key and query head.
        products=lambda s: 2 * s.selected * s.group * s.head_dim,
        inputs=lambda s, draw: partial(gather_attention, *draw.chosen_rows(s), scale=s.scale),
        check=(distance, ATTENTION_ERRORS),
        sizes=lambda s: f"{s.top_k:,} rows",
        stored=lambda s: s.vectors(2 * s.tokens),
        compiled=True,
    ),
    # Exact scores of k chosen keys of each KV head; values between the keys don't count.
    KernelOp(
        name="gather_scores",
        read=lambda s: s.selected * ID_BYTES + s.vectors(s.selected + s.queries),
        written=lambda s: s.selected * s.group * FP32_BYTES,
        products=lambda s: s.selected * s.group * s.head_dim,
        inputs=lambda s, draw: partial(gather_scores, *draw.chosen_rows(s), scale=s.scale),
        sizes=lambda s: f"{s.top_k:,} rows",
        stored=lambda s: s.vectors(2 * s.tokens),
        compiled=True,
    ),
    # A decode step's query over a dense window of all tokens.
    KernelOp(
        name="prompt_attention",
        # Keys and values [B, H, n, D], the query, the mask.
        read=lambda s: s.vectors(2 * s.tokens + s.queries) + s.mask_bytes,
        written=_outputs,
        products=lambda s: 2 * s.tokens * s.group * s.head_dim,
        inputs=_window,
        check=(distance, ATTENTION_ERRORS),
    ),
)
