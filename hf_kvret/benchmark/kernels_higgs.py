"""Coded keys and values, as ``bench kernels`` measures them: as ``store="higgs"`` has them.

That is with its default of bits, in groups of a head, and in the dtype of the model.
"""

from __future__ import annotations

import torch

from hf_kvret.benchmark.kernels_attention import (
    ATTENTION_ERRORS,
    PAGE_LEN,
    draw_pages,
    draw_query,
)
from hf_kvret.benchmark.kernels_work import (
    Call,
    Draw,
    KernelOp,
    KernelShape,
    Work,
    distance,
    unequal,
)
from hf_kvret.config import RetrievalConfig
from hf_kvret_kernels import higgs
from hf_kvret_kernels.paged import PagedRows

_BITS = RetrievalConfig.bits
_FP32_BYTES = 4
_ID_BYTES = 4
# Pairs nearly half-way between two points go to either; scales are rounded to fp16.
_OTHER_BYTES = 1e-2


class _HiggsOp(KernelOp):
    def sizes(self, shape: KernelShape) -> str:
        return f"{_BITS} bits, groups of {_codec(shape).group}"


class HiggsEncode(_HiggsOp):
    """Keys, or values, to codes and scales, as a flush does."""

    name = "higgs.encode"
    copies = 16

    def work(self, shape: KernelShape) -> Work:
        """Reads the vectors ``[B, H, n, D]``; writes the codes and 2 bytes a group. The
        transform is additions, and a nearest point can be found without a product for each point,
        so no multiply-adds count."""
        vectors = shape.all_heads * shape.length
        return Work(shape.vectors(vectors), vectors * _vector_bytes(shape))

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        codec, sizes = _codec(shape), (shape.batch, shape.heads, shape.length, shape.head_dim)
        x = draw.normal(*sizes, dtype=shape.dtype)
        return Call(lambda backend: codec.encode(x, backend=backend), unequal, _OTHER_BYTES)


class HiggsDecode(_HiggsOp):
    """Codes and scales to vectors, as exact attention over a second prompt does."""

    name = "higgs.decode"
    copies = 16

    def work(self, shape: KernelShape) -> Work:
        """Reads and writes what ``higgs.encode`` writes and reads."""
        vectors = shape.all_heads * shape.length
        return Work(vectors * _vector_bytes(shape), shape.vectors(vectors))

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        lead = (shape.batch, shape.heads, shape.length)
        codec, (codes, scales) = _codec(shape), _draw_coded(shape, draw, lead, 1)
        return Call(
            lambda backend: (codec.decode(codes, scales, shape.dtype, backend=backend),),
            distance,
            # Both are rounded to the vectors' dtype.
            ATTENTION_ERRORS[shape.dtype],
        )


class HiggsAttend(_HiggsOp):
    """Attention of a step's query over k chosen coded rows of each KV head."""

    name = "higgs.attend"
    copies = 64

    def work(self, shape: KernelShape) -> Work:
        """Reads 4-byte ids, codes and scales of the chosen keys and values once for a group, and
        the query; writes the output in fp32 and a log-sum for each query head. Two multiply-adds
        for each number of a key and query head. The page table is left out."""
        rows, queries = shape.all_heads * shape.top_k, shape.batch * shape.query_heads
        return Work(
            rows * (_ID_BYTES + 2 * _vector_bytes(shape)) + shape.vectors(queries),
            queries * (shape.head_dim + 1) * _FP32_BYTES,
            2 * rows * shape.group * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        codec, dim, scale = _codec(shape), shape.head_dim, shape.scale
        table = draw_pages(shape, draw)
        lead = (table.numel(), shape.heads, PAGE_LEN)
        chunk = torch.cat(_draw_coded(shape, draw, lead, 2), dim=-1)
        rows = PagedRows([chunk], table, 2 * codec.code_bytes(dim))
        query = draw_query(shape, draw)
        ids = draw.tokens(shape.length, (shape.batch, shape.heads, 1), shape.top_k)

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            return higgs.attend(
                query, rows, ids, codec, key_dim=dim, value_dim=dim, scale=scale, backend=backend
            )

        # Scaled grid points are rounded to the query's dtype too.
        return Call(run, distance, 2 * ATTENTION_ERRORS[shape.dtype])

    def sizes(self, shape: KernelShape) -> str:
        return f"{shape.top_k:,} rows, {super().sizes(shape)}"

    def held_bytes(self, shape: KernelShape) -> int:
        """All rows of the store lie there too."""
        rows = shape.all_heads * shape.length
        return super().held_bytes(shape) + 2 * rows * _vector_bytes(shape)


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


HIGGS_OPS: tuple[KernelOp, ...] = (HiggsEncode(), HiggsDecode(), HiggsAttend())
