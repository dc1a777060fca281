"""Operations on codewords (A2ATS), as ``bench kernels`` measures them.

A2ATS brings keys and queries to the space of its codewords in fp32, so that none of this depends on
the dtype of the model.
"""

from __future__ import annotations

import torch

from hf_kvret.benchmark.kernels_work import (
    Call,
    Draw,
    KernelOp,
    KernelShape,
    Work,
    distance,
    unequal,
)
from hf_kvret_kernels import codebook

_CODE_BYTES = 2
_FP32_BYTES = 4
# As `hf-kvret calibrate a2ats` saves codewords by default.
_BOOK_DTYPE = torch.bfloat16
# Keys nearly half-way between two codewords go to either; sums of scores are in fp32.
_OTHER_CODES = 1e-3
_SCORE_ERROR = 1e-3


class _CodebookOp(KernelOp):
    def sizes(self, shape: KernelShape) -> str:
        return f"{shape.codewords:,} codewords"


class Encode(_CodebookOp):
    """Keys to ids of their nearest codewords, the half norms given, as when tokens arrive."""

    name = "codebook.encode"

    def work(self, shape: KernelShape) -> Work:
        """Reads the keys ``[B, H, n, D]`` in fp32, the codebook ``[H, C, D]`` in bf16 and its half
        norms ``[H, C]`` in fp32 once; writes 2 bytes a token and KV head. A multiply-add for each
        number of a key and codeword: with thousands of codewords these are the floor, not the
        bytes."""
        tokens = shape.all_heads * shape.length
        norms = shape.heads * shape.codewords * _FP32_BYTES
        return Work(
            tokens * shape.head_dim * _FP32_BYTES + _book_bytes(shape) + norms,
            tokens * _CODE_BYTES,
            tokens * shape.codewords * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        x = draw.normal(shape.batch, shape.heads, shape.length, shape.head_dim)
        book = _draw_book(shape, draw)
        norms = codebook.half_norms(book)
        return Call(
            lambda backend: (codebook.encode(x, book, norms=norms, backend=backend),),
            unequal,
            _OTHER_CODES,
        )


class ScoreTable(_CodebookOp):
    """Products of a step's query and all codewords; the same for every length."""

    name = "codebook.score_table"

    def work(self, shape: KernelShape) -> Work:
        """Reads the query ``[B, Hq, 1, D]`` in fp32 and the codebook ``[H, C, D]`` in bf16 once;
        writes the table ``[B, Hq, 1, C]`` in fp32. A multiply-add for each number of a query head
        and codeword."""
        queries = shape.batch * shape.query_heads
        entries = queries * shape.codewords
        return Work(
            queries * shape.head_dim * _FP32_BYTES + _book_bytes(shape),
            entries * _FP32_BYTES,
            entries * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        query = draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim)
        book = _draw_book(shape, draw)
        return Call(
            lambda backend: (
                codebook.score_table(query, book, scale=shape.scale, backend=backend),
            ),
            distance,
            _SCORE_ERROR,
        )


class Lookup(_CodebookOp):
    """Scores of all tokens for each query head, as ``budget_of="union"`` needs them."""

    name = "codebook.lookup"

    def work(self, shape: KernelShape) -> Work:
        """Reads the table ``[B, Hq, 1, C]`` in fp32, 2 bytes a token and KV head, and a byte of
        mask a token; writes 4 bytes a token and query head."""
        return Work(
            _table_and_codes(shape),
            shape.batch * shape.query_heads * shape.length * _FP32_BYTES,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        table, codes = _draw_table(shape, draw)
        valid = draw.all_valid(shape)
        return Call(
            lambda backend: (codebook.lookup(table, codes, valid=valid, backend=backend),),
            unequal,
            0.0,
        )


class LookupScores(_CodebookOp):
    """Scores of all tokens for each KV head, the codes counted on the way, as a step calls it."""

    name = "codebook.lookup_scores"

    def work(self, shape: KernelShape) -> Work:
        """Reads what ``codebook.lookup`` reads, the codes once although they are first counted and
        then looked up; writes 4 bytes a token and KV head."""
        return Work(_table_and_codes(shape), shape.all_heads * shape.length * _FP32_BYTES)

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        table, codes = _draw_table(shape, draw)
        valid = draw.all_valid(shape)
        return Call(
            lambda backend: (codebook.lookup_scores(table, codes, valid=valid, backend=backend),),
            distance,
            _SCORE_ERROR,
        )


def _table_and_codes(shape: KernelShape) -> int:
    table = shape.batch * shape.query_heads * shape.codewords * _FP32_BYTES
    codes = shape.all_heads * shape.length * _CODE_BYTES
    return table + codes + shape.batch * shape.length


def _book_bytes(shape: KernelShape) -> int:
    return shape.heads * shape.codewords * shape.head_dim * _BOOK_DTYPE.itemsize


def _draw_book(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=_BOOK_DTYPE)


def _draw_table(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    table = draw.normal(shape.batch, shape.query_heads, 1, shape.codewords)
    codes = draw.integers(
        shape.codewords, shape.batch, shape.heads, shape.length, dtype=torch.int16
    )
    return table, codes


CODEBOOK_OPS: tuple[KernelOp, ...] = (Encode(), ScoreTable(), Lookup(), LookupScores())
