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
    SCORE_ERROR,
    SizedOp,
    Work,
    distance,
    operation,
    unequal,
)
from hf_kvret.config import RetrievalConfig
from hf_kvret_kernels import higgs
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.prompt_attention import prompt_attention

_BITS = RetrievalConfig.bits


@operation("gather_attention", distance, ATTENTION_ERRORS, compiled=True)
def _gather_attention(shape: KernelShape) -> SizedOp:
    """Attention of a step's query over k chosen rows of each KV head.

    Reads 4-byte ids, keys and values of the chosen rows once for a group, and the query; writes the
    output in fp32 and a log-sum for each query head. Two multiply-adds for each number of a key and
    query head. The page table is left out.
    """
    read = shape.selected * ID_BYTES + shape.vectors(2 * shape.selected + shape.queries)
    return _over_rows(shape, _attending(shape, read, shape.selected), gather_attention)


@operation("gather_scores", distance, SCORE_ERROR, compiled=True)
def _gather_scores(shape: KernelShape) -> SizedOp:
    """Exact scores of k chosen keys of each KV head.

    Reads 4-byte ids and the chosen keys once for a group, and the query; writes 4 bytes a key and
    query head. A multiply-add for each number of a key and query head. The page table is left out,
    and so are the values between the keys.
    """
    read = shape.selected * ID_BYTES + shape.vectors(shape.selected + shape.queries)
    scores = shape.selected * shape.group
    return _over_rows(
        shape, Work(read, scores * FP32_BYTES, scores * shape.head_dim), gather_scores
    )


@operation("prompt_attention", distance, ATTENTION_ERRORS)
def _prompt_attention(shape: KernelShape) -> SizedOp:
    """A decode step's query over a dense window of all tokens.

    Reads keys and values ``[B, H, n, D]`` once for a group, the query and a byte of mask a token;
    writes and multiplies as ``gather_attention`` does, for all tokens.
    """
    read = shape.vectors(2 * shape.tokens + shape.queries) + shape.mask_bytes

    def inputs(draw: Draw) -> Any:
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

    return SizedOp(_attending(shape, read, shape.tokens), inputs)


# Pairs nearly half-way between two points go to either; scales are rounded to fp16.
@operation("higgs.encode", unequal, 1e-2, copies=16)
def _encode(shape: KernelShape) -> SizedOp:
    """Keys, or values, to codes and scales, as a flush does.

    Reads the vectors ``[B, H, n, D]``; writes the codes and 2 bytes a group. The transform is
    additions, and a nearest point can be found without a product for each point, so no
    multiply-adds count.
    """
    work = Work(shape.vectors(shape.tokens), shape.tokens * _vector_bytes(shape))
    codec = _codec(shape)
    return SizedOp(work, lambda draw: partial(codec.encode, draw.keys(shape)), _coding(shape))


# Both are rounded to the vectors' dtype.
@operation("higgs.decode", distance, ATTENTION_ERRORS, copies=16)
def _decode(shape: KernelShape) -> SizedOp:
    """Codes and scales to vectors, as exact attention over a second prompt does.

    Reads and writes what ``higgs.encode`` writes and reads.
    """

    def inputs(draw: Draw) -> Any:
        coded = _draw_coded(shape, draw, (shape.batch, shape.heads, shape.length), 1)
        return partial(_codec(shape).decode, *coded, shape.dtype)

    work = Work(shape.tokens * _vector_bytes(shape), shape.vectors(shape.tokens))
    return SizedOp(work, inputs, _coding(shape))


# Scaled grid points are rounded to the query's dtype too.
_CODED_ERRORS = {dtype: 2 * error for dtype, error in ATTENTION_ERRORS.items()}


@operation("higgs.attend", distance, _CODED_ERRORS, copies=64)
def _attend(shape: KernelShape) -> SizedOp:
    """Attention of a step's query over k chosen coded rows of each KV head.

    As ``gather_attention``, with codes and scales of the chosen keys and values.
    """
    pair_bytes = 2 * _vector_bytes(shape)
    read = shape.selected * (ID_BYTES + pair_bytes) + shape.vectors(shape.queries)

    def inputs(draw: Draw) -> Any:
        codec, dim, table = _codec(shape), shape.head_dim, draw.pages(shape)
        coded = _draw_coded(shape, draw, (table.numel(), shape.heads, PAGE_LEN), 2)
        rows = PagedRows([torch.cat(coded, dim=-1)], table, 2 * codec.code_bytes(dim))
        query, ids = draw.query(shape), draw.ids(shape, shape.top_k)
        sizes = {"key_dim": dim, "value_dim": dim, "scale": shape.scale}
        return partial(higgs.attend, query, rows, ids, codec, **sizes)

    sizes = f"{shape.top_k:,} rows, {_coding(shape)}"
    work = _attending(shape, read, shape.selected)
    return SizedOp(work, inputs, sizes, stored=shape.tokens * pair_bytes)


def _attending(shape: KernelShape, read_bytes: int, rows: int) -> Work:
    """Attention to ``rows`` of all KV heads: an output in fp32 and a log-sum for each query head,
    two multiply-adds for each number of a key and query head."""
    written = shape.queries * (shape.head_dim + 1) * FP32_BYTES
    return Work(read_bytes, written, 2 * rows * shape.group * shape.head_dim)


def _over_rows(shape: KernelShape, work: Work, called: Any) -> SizedOp:
    """k random rows of a paged store for each KV head; all its rows lie there too."""
    return SizedOp(
        work,
        lambda draw: partial(called, *draw.chosen_rows(shape), scale=shape.scale),
        f"{shape.top_k:,} rows",
        stored=shape.vectors(2 * shape.tokens),
    )


def _coding(shape: KernelShape) -> str:
    return f"{_BITS} bits, groups of {_codec(shape).group}"


def _codec(shape: KernelShape) -> higgs.HiggsCodec:
    """With the largest groups that a head is made of."""
    return higgs.HiggsCodec(_BITS, shape.head_dim & -shape.head_dim)


def _vector_bytes(shape: KernelShape) -> int:
    """Codes and scales of a vector of the head dim."""
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


HIGGS_OPS = (_encode, _decode, _attend)
ATTENTION_OPS = (_gather_attention, _gather_scores, _prompt_attention)
