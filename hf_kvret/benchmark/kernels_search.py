"""Proxy scores and top-k (LRQK), lists of centroids (CTkvr), as ``bench kernels`` measures them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_kvret.benchmark.kernels_work import (
    Call,
    Draw,
    KernelOp,
    KernelShape,
    Work,
    distance,
    not_shared,
    unequal,
)
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret_kernels import centroid, proxy

_FP32_BYTES = 4
# LRQK keeps proxies so, whatever the dtype of the model.
_PROXY_DTYPE = torch.bfloat16
_ID_BYTES = 4
_SCORE_ERROR = 1e-3
# Keys at the end of a list are nearly as good as those behind it.
_OTHER_KEYS = 1e-2
# As CTkvr reads its store.
_PIECE_LEN = 1 << 14


class ProxyRelevance(KernelOp):
    """Scores of all tokens from proxies of their keys, the best of a group for each token."""

    name = "proxy.relevance"
    copies = 8

    def work(self, shape: KernelShape) -> Work:
        """Reads the proxies ``[B, H, n, r]`` in bf16 once, although a softmax over tokens takes two
        passes or room for all scores, the queries' ``[B, Hq, 1, r]`` in fp32, and a byte of mask a
        token; writes 4 bytes a token and KV head. A multiply-add for each number of a proxy and
        query head."""
        tokens = shape.all_heads * shape.length
        queries = shape.batch * shape.query_heads * shape.rank * _FP32_BYTES
        return Work(
            tokens * shape.rank * _PROXY_DTYPE.itemsize + queries + shape.batch * shape.length,
            tokens * _FP32_BYTES,
            tokens * shape.group * shape.rank,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        query = draw.normal(shape.batch, shape.query_heads, 1, shape.rank) * shape.scale
        rows = draw.normal(shape.batch, shape.heads, shape.length, shape.rank, dtype=_PROXY_DTYPE)
        valid = draw.all_valid(shape)
        return Call(
            lambda backend: (
                proxy.relevance(query, rows, shape.heads, valid=valid, backend=backend),
            ),
            distance,
            _SCORE_ERROR,
        )

    def sizes(self, shape: KernelShape) -> str:
        return f"rank {shape.rank}"


class ProxyTopK(KernelOp):
    """The highest scores of each KV head."""

    name = "proxy.top_k"

    def work(self, shape: KernelShape) -> Work:
        """Reads the scores ``[B, H, 1, n]`` in fp32 once; writes k ids of 4 bytes for each KV
        head."""
        return Work(
            shape.all_heads * shape.length * _FP32_BYTES,
            shape.all_heads * shape.top_k * _ID_BYTES,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        scores = draw.normal(shape.batch, shape.heads, 1, shape.length)

        def values(ids: Sequence[Any]) -> list[torch.Tensor]:
            # Which of equal scores are taken is open, so scores are compared, and ids that are
            # out of range are told by them.
            known = ((ids[0] >= 0) & (ids[0] < shape.length)).all()
            taken = scores.gather(3, ids[0].long().clamp(0, shape.length - 1))
            found = taken.sort(dim=-1).values
            distinct = ids[0].sort(dim=-1).values.diff(dim=-1).ne(0).all()
            return [torch.where(known & distinct, found, float("nan"))]

        return Call(
            lambda backend: (proxy.top_k(scores, shape.top_k, backend=backend),),
            lambda found, want: unequal(values(found), values(want)),
            0.0,
        )

    def sizes(self, shape: KernelShape) -> str:
        return f"top {shape.top_k:,}"


class CentroidTopKeys(KernelOp):
    """Lists of the best keys for as many past queries as CTkvr has for that length."""

    name = "centroid.top_keys"

    def work(self, shape: KernelShape) -> Work:
        """Reads the keys ``[B, H, n, D]`` once, although with several heads in a group they are
        read for the denominators first, the past queries ``[B, H, C, G, D]`` and a byte of mask a
        token; writes a list of 4-byte ids for each. A multiply-add for each number of a key and
        past query head: they are the floor."""
        centroids, listed = _lists(shape)
        queries = shape.all_heads * centroids * shape.group
        keys = shape.all_heads * shape.length
        return Work(
            shape.vectors(keys + queries) + shape.batch * shape.length,
            shape.all_heads * centroids * listed * _ID_BYTES,
            queries * shape.length * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        centroids, listed = _lists(shape)
        queries = _draw_bundles(shape, draw, centroids)
        keys = draw.normal(
            shape.batch, shape.heads, shape.length, shape.head_dim, dtype=shape.dtype
        )
        valid = draw.all_valid(shape)

        def pieces() -> Iterator[tuple[int, torch.Tensor]]:
            for start in range(0, shape.length, _PIECE_LEN):
                yield start, keys[:, :, start : start + _PIECE_LEN]

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            scale = shape.scale
            lists = centroid.top_keys(
                queries, pieces, listed, valid=valid, scale=scale, backend=backend
            )
            return (lists,)

        return Call(run, not_shared, _OTHER_KEYS)

    def sizes(self, shape: KernelShape) -> str:
        centroids, listed = _lists(shape)
        return f"{centroids:,} lists of {listed:,}"


class CentroidSimilarity(KernelOp):
    """Cosines of a step's query and all centroids, the largest of a group."""

    name = "centroid.similarity"

    def work(self, shape: KernelShape) -> Work:
        """Reads the query ``[B, H, 1, G, D]``, the centroids ``[B, H, C, G, D]`` and their inverse
        norms in fp32; writes 4 bytes a centroid and KV head. A multiply-add for each number of a
        centroid."""
        centroids, _ = _lists(shape)
        vectors = shape.all_heads * centroids * shape.group
        return Work(
            shape.vectors(vectors + shape.batch * shape.query_heads) + vectors * _FP32_BYTES,
            shape.all_heads * centroids * _FP32_BYTES,
            vectors * shape.head_dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        query = _draw_bundles(shape, draw, 1)
        centroids = _draw_bundles(shape, draw, _lists(shape)[0])
        norms = centroids.float().norm(dim=-1).reciprocal()
        return Call(
            lambda backend: (centroid.similarity(query, centroids, norms, backend=backend),),
            distance,
            _SCORE_ERROR,
        )

    def sizes(self, shape: KernelShape) -> str:
        return f"{_lists(shape)[0]:,} centroids"


def _lists(shape: KernelShape) -> tuple[int, int]:
    """Centroids of CTkvr at that length, and keys of a list."""
    config = CTkvrConfig()
    return config.centroids_for(shape.length), config.list_len(shape.length, shape.top_k)


def _draw_bundles(shape: KernelShape, draw: Draw, count: int) -> torch.Tensor:
    sizes = (shape.batch, shape.heads, count, shape.group, shape.head_dim)
    return draw.normal(*sizes, dtype=shape.dtype)


SEARCH_OPS: tuple[KernelOp, ...] = (
    ProxyRelevance(),
    ProxyTopK(),
    CentroidTopKeys(),
    CentroidSimilarity(),
)
