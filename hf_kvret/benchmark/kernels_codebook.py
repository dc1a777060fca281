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
    Error,
    KernelOp,
    not_shared,
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


def _encode(shape: KernelShape, draw: Draw) -> Any:
    keys, book = draw.keys(shape, torch.float32), _draw_book(shape, draw)
    return partial(codebook.encode, keys, book, norms=codebook.half_norms(book))


def _score_table(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim)
    return partial(codebook.score_table, query, _draw_book(shape, draw), scale=shape.scale)


def _lookup(name: str, shape: KernelShape, draw: Draw) -> Any:
    table = draw.normal(shape.batch, shape.query_heads, 1, shape.codewords)
    lead = (shape.batch, shape.heads, shape.length)
    codes = draw.integers(shape.codewords, *lead, dtype=torch.int16)
    return partial(getattr(codebook, name), table, codes, valid=draw.all_valid(shape))


def _table_and_codes(shape: KernelShape) -> int:
    """The table ``[B, Hq, 1, C]`` in fp32, a code for each token and KV head, and the mask."""
    table = shape.queries * shape.codewords * FP32_BYTES
    return table + shape.tokens * _CODE_BYTES + shape.mask_bytes


def _book_bytes(shape: KernelShape) -> int:
    """The codebook ``[H, C, D]`` in bf16."""
    return shape.heads * shape.codewords * shape.head_dim * _BOOK_DTYPE.itemsize


def _draw_book(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=_BOOK_DTYPE)


def _codewords(shape: KernelShape) -> str:
    return f"{shape.codewords:,} codewords"


CODEBOOK_OPS = (
    # Keys to ids of their nearest codewords, the half norms given, as when tokens arrive. With
    # thousands of codewords the multiply-adds are the floor, not the bytes.
    KernelOp(
        name="codebook.encode",
        # Keys [B, H, n, D] in fp32, the codebook, its half norms [H, C] in fp32.
        read=lambda s: (
            (s.tokens * s.head_dim + s.heads * s.codewords) * FP32_BYTES + _book_bytes(s)
        ),
        written=lambda s: s.tokens * _CODE_BYTES,
        products=lambda s: s.tokens * s.codewords * s.head_dim,
        inputs=_encode,
        # Keys nearly half-way between two codewords go to either.
        check=(unequal, 1e-3),
        sizes=_codewords,
    ),
    # Products of a step's query and all codewords; the same for every length.
    KernelOp(
        name="codebook.score_table",
        # The query [B, Hq, 1, D] in fp32, and the codebook.
        read=lambda s: s.queries * s.head_dim * FP32_BYTES + _book_bytes(s),
        # The table [B, Hq, 1, C] in fp32.
        written=lambda s: s.queries * s.codewords * FP32_BYTES,
        products=lambda s: s.queries * s.codewords * s.head_dim,
        inputs=_score_table,
        sizes=_codewords,
    ),
    # Scores of all tokens for each query head, as budget_of="union" needs them.
    KernelOp(
        name="codebook.lookup",
        read=_table_and_codes,
        written=lambda s: s.queries * s.length * FP32_BYTES,
        inputs=partial(_lookup, "lookup"),
        check=(unequal, 0.0),
        sizes=_codewords,
    ),
    # Scores of all tokens for each KV head, the codes counted on the way, as a step calls it. They
    # are read once, although they are first counted and then looked up.
    KernelOp(
        name="codebook.lookup_scores",
        read=_table_and_codes,
        written=lambda s: s.tokens * FP32_BYTES,
        inputs=partial(_lookup, "lookup_scores"),
        sizes=_codewords,
    ),
)


def _relevance(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.rank) * shape.scale
    rows = draw.normal(shape.batch, shape.heads, shape.length, shape.rank, dtype=_PROXY_DTYPE)
    return partial(proxy.relevance, query, rows, shape.heads, valid=draw.all_valid(shape))


def _top_k(shape: KernelShape, draw: Draw) -> Any:
    return partial(proxy.top_k, draw.normal(shape.batch, shape.heads, 1, shape.length), shape.top_k)


def _top_k_error(call: Any) -> Error:
    """Which of equal scores are taken is open, so the scores of the ids are compared."""
    scores = call.args[0]

    def values(ids: Sequence[Any]) -> list[torch.Tensor]:
        # Ids out of range, and those that are there twice, are told by NaN.
        known = ((ids[0] >= 0) & (ids[0] < scores.shape[3])).all()
        taken = scores.gather(3, ids[0].long().clamp(0, scores.shape[3] - 1))
        distinct = ids[0].sort(dim=-1).values.diff(dim=-1).ne(0).all()
        return [torch.where(known & distinct, taken.sort(dim=-1).values, float("nan"))]

    return lambda found, want: unequal(values(found), values(want))


def _top_keys(shape: KernelShape, draw: Draw) -> Any:
    centroids, listed = _lists(shape)
    queries, keys, valid = _bundles(shape, draw, centroids), draw.keys(shape), draw.all_valid(shape)

    def pieces() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, shape.length, _PIECE_LEN):
            yield start, keys[:, :, start : start + _PIECE_LEN]

    return partial(centroid.top_keys, queries, pieces, listed, valid=valid, scale=shape.scale)


def _similarity(shape: KernelShape, draw: Draw) -> Any:
    query, centroids = (_bundles(shape, draw, count) for count in (1, _lists(shape)[0]))
    return partial(centroid.similarity, query, centroids, centroids.float().norm(dim=-1) ** -1)


def _bundles(shape: KernelShape, draw: Draw, count: int) -> torch.Tensor:
    sizes = (shape.batch, shape.heads, count, shape.group, shape.head_dim)
    return draw.normal(*sizes, dtype=shape.dtype)


def _lists(shape: KernelShape) -> tuple[int, int]:
    """Centroids of CTkvr at that length, and keys of a list."""
    config = CTkvrConfig()
    return config.centroids_for(shape.length), config.list_len(shape.length, shape.top_k)


def _past_queries(shape: KernelShape) -> int:
    """Vectors ``[B, H, C, G]`` of the centroids."""
    return shape.queries * _lists(shape)[0]


SEARCH_OPS = (
    # Scores of all tokens from proxies of their keys, the best of a group for each token. Proxies
    # are read once, although a softmax over tokens takes two passes or room for all scores.
    KernelOp(
        name="proxy.relevance",
        # Proxies [B, H, n, r] in bf16, the queries' [B, Hq, 1, r] in fp32, the mask.
        read=lambda s: (
            s.tokens * s.rank * _PROXY_DTYPE.itemsize
            + s.queries * s.rank * FP32_BYTES
            + s.mask_bytes
        ),
        written=lambda s: s.tokens * FP32_BYTES,
        products=lambda s: s.tokens * s.group * s.rank,
        inputs=_relevance,
        sizes=lambda s: f"rank {s.rank}",
        copies=8,
    ),
    # The highest scores [B, H, 1, n] in fp32 of each KV head.
    KernelOp(
        name="proxy.top_k",
        read=lambda s: s.tokens * FP32_BYTES,
        written=lambda s: s.selected * ID_BYTES,
        inputs=_top_k,
        check=(unequal, 0.0),
        error_of=_top_k_error,
        sizes=lambda s: f"top {s.top_k:,}",
    ),
    # Lists of the best keys for as many past queries as CTkvr has for that length. Keys are read
    # once, although with several heads in a group they are read for the denominators first.
    # Multiply-adds are the floor.
    KernelOp(
        name="centroid.top_keys",
        # Keys [B, H, n, D], past queries [B, H, C, G, D], the mask.
        read=lambda s: s.vectors(s.tokens + _past_queries(s)) + s.mask_bytes,
        written=lambda s: s.all_heads * _lists(s)[0] * _lists(s)[1] * ID_BYTES,
        products=lambda s: _past_queries(s) * s.length * s.head_dim,
        inputs=_top_keys,
        # Keys at the end of a list are nearly as good as those behind it.
        check=(not_shared, 1e-2),
        sizes=lambda s: "{:,} lists of {:,}".format(*_lists(s)),
    ),
    # Cosines of a step's query and all centroids, the largest of a group.
    KernelOp(
        name="centroid.similarity",
        # The query [B, H, 1, G, D], centroids [B, H, C, G, D], their inverse norms in fp32.
        read=lambda s: s.vectors(_past_queries(s) + s.queries) + _past_queries(s) * FP32_BYTES,
        written=lambda s: s.all_heads * _lists(s)[0] * FP32_BYTES,
        products=lambda s: _past_queries(s) * s.head_dim,
        inputs=_similarity,
        sizes=lambda s: f"{_lists(s)[0]:,} centroids",
    ),
)
