"""Operations on codewords (A2ATS), proxies (LRQK) and lists of centroids (CTkvr).

A2ATS brings keys and queries to the space of its codewords in fp32, so that none of this depends on
the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from hf_kvret.benchmark.kernels_inputs import Draw, KernelShape
from hf_kvret.benchmark.kernels_work import (
    FP32_BYTES,
    ID_BYTES,
    SCORE_ERROR,
    Call,
    SizedOp,
    Work,
    as_tuple,
    distance,
    not_shared,
    operation,
    unequal,
)
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret_kernels import centroid, codebook, proxy

_CODE_BYTES = 2
# As `hf-kvret calibrate a2ats` saves codewords by default.
_BOOK_DTYPE = torch.bfloat16
# LRQK keeps proxies so, whatever the dtype of the model.
_PROXY_DTYPE = torch.bfloat16
# As CTkvr reads its store.
_PIECE_LEN = 1 << 14


# Keys nearly half-way between two codewords go to either.
@operation("codebook.encode", unequal, 1e-3)
def _encode(shape: KernelShape) -> SizedOp:
    """Keys to ids of their nearest codewords, the half norms given, as when tokens arrive.

    Reads the keys ``[B, H, n, D]`` in fp32, the codebook ``[H, C, D]`` in bf16 and its half norms
    ``[H, C]`` in fp32 once; writes 2 bytes a token and KV head. A multiply-add for each number of a
    key and codeword: with thousands of codewords these are the floor, not the bytes.
    """
    read = (shape.tokens * shape.head_dim + shape.heads * shape.codewords) * FP32_BYTES
    products = shape.tokens * shape.codewords * shape.head_dim
    work = Work(read + _book_bytes(shape), shape.tokens * _CODE_BYTES, products)

    def inputs(draw: Draw) -> Any:
        keys, book = draw.keys(shape, torch.float32), _draw_book(shape, draw)
        return partial(codebook.encode, keys, book, norms=codebook.half_norms(book))

    return SizedOp(work, inputs, _codewords(shape))


@operation("codebook.score_table", distance, SCORE_ERROR)
def _score_table(shape: KernelShape) -> SizedOp:
    """Products of a step's query and all codewords; the same for every length.

    Reads the query ``[B, Hq, 1, D]`` in fp32 and the codebook ``[H, C, D]`` in bf16 once; writes
    the table ``[B, Hq, 1, C]`` in fp32. A multiply-add for each number of a query head and
    codeword.
    """
    read = shape.queries * shape.head_dim * FP32_BYTES + _book_bytes(shape)
    entries = shape.queries * shape.codewords
    work = Work(read, entries * FP32_BYTES, entries * shape.head_dim)

    def inputs(draw: Draw) -> Any:
        query = draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim)
        return partial(codebook.score_table, query, _draw_book(shape, draw), scale=shape.scale)

    return SizedOp(work, inputs, _codewords(shape))


@operation("codebook.lookup", unequal, 0.0)
def _lookup(shape: KernelShape) -> SizedOp:
    """Scores of all tokens for each query head, as ``budget_of="union"`` needs them.

    Reads the table ``[B, Hq, 1, C]`` in fp32, 2 bytes a token and KV head, and a byte of mask a
    token; writes 4 bytes a token and query head.
    """
    work = Work(_table_and_codes(shape), shape.queries * shape.length * FP32_BYTES)
    return SizedOp(work, partial(_looking_up, codebook.lookup, shape), _codewords(shape))


@operation("codebook.lookup_scores", distance, SCORE_ERROR)
def _lookup_scores(shape: KernelShape) -> SizedOp:
    """Scores of all tokens for each KV head, the codes counted on the way, as a step calls it.

    Reads what ``codebook.lookup`` reads, the codes once although they are first counted and then
    looked up; writes 4 bytes a token and KV head.
    """
    work = Work(_table_and_codes(shape), shape.tokens * FP32_BYTES)
    return SizedOp(work, partial(_looking_up, codebook.lookup_scores, shape), _codewords(shape))


@operation("proxy.relevance", distance, SCORE_ERROR, copies=8)
def _relevance(shape: KernelShape) -> SizedOp:
    """Scores of all tokens from proxies of their keys, the best of a group for each token.

    Reads the proxies ``[B, H, n, r]`` in bf16 once, although a softmax over tokens takes two passes
    or room for all scores, the queries' ``[B, Hq, 1, r]`` in fp32, and a byte of mask a token;
    writes 4 bytes a token and KV head. A multiply-add for each number of a proxy and query head.
    """
    rows = shape.tokens * shape.rank * _PROXY_DTYPE.itemsize
    read = rows + shape.queries * shape.rank * FP32_BYTES + shape.mask_bytes
    products = shape.tokens * shape.group * shape.rank

    def inputs(draw: Draw) -> Any:
        query = draw.normal(shape.batch, shape.query_heads, 1, shape.rank) * shape.scale
        rows = draw.normal(shape.batch, shape.heads, shape.length, shape.rank, dtype=_PROXY_DTYPE)
        return partial(proxy.relevance, query, rows, shape.heads, valid=draw.all_valid(shape))

    return SizedOp(Work(read, shape.tokens * FP32_BYTES, products), inputs, f"rank {shape.rank}")


@operation("proxy.top_k", unequal, 0.0)
def _top_k(shape: KernelShape) -> SizedOp:
    """The highest scores of each KV head.

    Reads the scores ``[B, H, 1, n]`` in fp32 once; writes k ids of 4 bytes for each KV head.
    """

    def inputs(draw: Draw) -> Call:
        scores = draw.normal(shape.batch, shape.heads, 1, shape.length)

        def values(ids: Sequence[Any]) -> list[torch.Tensor]:
            # Which of equal scores are taken is open, so scores are compared, and ids that are
            # out of range or there twice are told by NaN.
            known = ((ids[0] >= 0) & (ids[0] < shape.length)).all()
            taken = scores.gather(3, ids[0].long().clamp(0, shape.length - 1))
            distinct = ids[0].sort(dim=-1).values.diff(dim=-1).ne(0).all()
            return [torch.where(known & distinct, taken.sort(dim=-1).values, float("nan"))]

        return Call(
            lambda backend: as_tuple(proxy.top_k(scores, shape.top_k, backend=backend)),
            lambda found, want: unequal(values(found), values(want)),
            0.0,
        )

    work = Work(shape.tokens * FP32_BYTES, shape.selected * ID_BYTES)
    return SizedOp(work, inputs, f"top {shape.top_k:,}")


# Keys at the end of a list are nearly as good as those behind it.
@operation("centroid.top_keys", not_shared, 1e-2)
def _top_keys(shape: KernelShape) -> SizedOp:
    """Lists of the best keys for as many past queries as CTkvr has for that length.

    Reads the keys ``[B, H, n, D]`` once, although with several heads in a group they are read for
    the denominators first, the past queries ``[B, H, C, G, D]`` and a byte of mask a token; writes
    a list of 4-byte ids for each. A multiply-add for each number of a key and past query head: they
    are the floor.
    """
    centroids, listed = _lists(shape)
    queries = shape.all_heads * centroids * shape.group
    work = Work(
        shape.vectors(shape.tokens + queries) + shape.mask_bytes,
        shape.all_heads * centroids * listed * ID_BYTES,
        queries * shape.length * shape.head_dim,
    )

    def inputs(draw: Draw) -> Any:
        queries, keys = _draw_bundles(shape, draw, centroids), draw.keys(shape)

        def pieces() -> Iterator[tuple[int, torch.Tensor]]:
            for start in range(0, shape.length, _PIECE_LEN):
                yield start, keys[:, :, start : start + _PIECE_LEN]

        valid = draw.all_valid(shape)
        return partial(centroid.top_keys, queries, pieces, listed, valid=valid, scale=shape.scale)

    return SizedOp(work, inputs, f"{centroids:,} lists of {listed:,}")


@operation("centroid.similarity", distance, SCORE_ERROR)
def _similarity(shape: KernelShape) -> SizedOp:
    """Cosines of a step's query and all centroids, the largest of a group.

    Reads the query ``[B, H, 1, G, D]``, the centroids ``[B, H, C, G, D]`` and their inverse norms
    in fp32; writes 4 bytes a centroid and KV head. A multiply-add for each number of a centroid.
    """
    count, _ = _lists(shape)
    vectors = shape.all_heads * count * shape.group
    read = shape.vectors(vectors + shape.queries) + vectors * FP32_BYTES
    work = Work(read, shape.all_heads * count * FP32_BYTES, vectors * shape.head_dim)

    def inputs(draw: Draw) -> Any:
        query, centroids = (_draw_bundles(shape, draw, some) for some in (1, count))
        norms = centroids.float().norm(dim=-1).reciprocal()
        return partial(centroid.similarity, query, centroids, norms)

    return SizedOp(work, inputs, f"{count:,} centroids")


def _codewords(shape: KernelShape) -> str:
    return f"{shape.codewords:,} codewords"


def _table_and_codes(shape: KernelShape) -> int:
    table = shape.queries * shape.codewords * FP32_BYTES
    return table + shape.tokens * _CODE_BYTES + shape.mask_bytes


def _book_bytes(shape: KernelShape) -> int:
    return shape.heads * shape.codewords * shape.head_dim * _BOOK_DTYPE.itemsize


def _draw_book(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=_BOOK_DTYPE)


def _looking_up(look_up: Any, shape: KernelShape, draw: Draw) -> Any:
    table = draw.normal(shape.batch, shape.query_heads, 1, shape.codewords)
    lead = (shape.batch, shape.heads, shape.length)
    codes = draw.integers(shape.codewords, *lead, dtype=torch.int16)
    return partial(look_up, table, codes, valid=draw.all_valid(shape))


def _lists(shape: KernelShape) -> tuple[int, int]:
    """Centroids of CTkvr at that length, and keys of a list."""
    config = CTkvrConfig()
    return config.centroids_for(shape.length), config.list_len(shape.length, shape.top_k)


def _draw_bundles(shape: KernelShape, draw: Draw, count: int) -> torch.Tensor:
    sizes = (shape.batch, shape.heads, count, shape.group, shape.head_dim)
    return draw.normal(*sizes, dtype=shape.dtype)


CODEBOOK_OPS = (_encode, _score_table, _lookup, _lookup_scores)
SEARCH_OPS = (_relevance, _top_k, _top_keys, _similarity)
