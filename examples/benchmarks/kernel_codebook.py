"""Operations on codewords (A2ATS), proxies (LRQK) and lists of centroids (CTkvr).

A2ATS brings keys and queries to the space of its codewords in fp32, and LRQK keeps proxies in bf16,
so that they don't depend on the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from kernel_inputs import CTKVR, Draw, KernelShape
from kernel_work import (
    SCORE_ERROR,
    Error,
    KernelOp,
    distance,
    not_shared,
    unequal,
)

from hf_kvret_kernels import centroid, codebook, proxy
from hf_kvret_kernels.top_k import top_k

# As CTkvr reads its store.
_PIECE_LEN = 1 << 14
_SCORES = (distance, SCORE_ERROR)


def _encode(shape: KernelShape, draw: Draw) -> Any:
    keys, book = draw.keys(shape, torch.float32), _draw_book(shape, draw)
    return partial(codebook.encode, keys, book, norms=codebook.half_norms(book))


def _score_table(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.head_dim)
    return partial(codebook.score_table, query, _draw_book(shape, draw), scale=shape.scale)


def _draw_book(shape: KernelShape, draw: Draw) -> torch.Tensor:
    # As `hf-kvret calibrate a2ats` saves codewords by default.
    return draw.normal(shape.heads, shape.codewords, shape.head_dim, dtype=torch.bfloat16)


def _lookup(name: str, shape: KernelShape, draw: Draw) -> Any:
    table = draw.normal(shape.batch, shape.query_heads, 1, shape.codewords)
    lead = (shape.batch, shape.heads, shape.length)
    codes = draw.integers(shape.codewords, *lead, dtype=torch.int16)
    return partial(getattr(codebook, name), table, codes, valid=draw.all_valid(shape))


CODEBOOK_OPS = (
    # Keys to ids of their nearest codewords, the half norms given, as when tokens arrive. With
    # thousands of codewords the multiply-adds are the floor, not the bytes.
    KernelOp(
        name="codebook.encode",
        read="B H n D f32 + H C D bf16 + H C f32",
        written="B H n i16",
        products="B H n C D",
        inputs=_encode,
        # Keys nearly half-way between two codewords go to either.
        check=(unequal, 1e-3),
        sizes="{C:,} codewords",
    ),
    # Products of a step's query and all codewords; the same for every length.
    KernelOp(
        name="codebook.score_table",
        read="B Hq D f32 + H C D bf16",
        written="B Hq C f32",
        products="B Hq C D",
        inputs=_score_table,
        check=_SCORES,
        sizes="{C:,} codewords",
    ),
    # Scores of all tokens for each query head, as budget_of="union" needs them.
    KernelOp(
        name="codebook.lookup",
        read="B Hq C f32 + B H n i16 + B n",
        written="B Hq n f32",
        inputs=partial(_lookup, "lookup"),
        check=(unequal, 0.0),
        sizes="{C:,} codewords",
    ),
    # Scores of all tokens for each KV head, as a step calls it. Codes are read once, although they
    # are first counted and then looked up.
    KernelOp(
        name="codebook.lookup_scores",
        read="B Hq C f32 + B H n i16 + B n",
        written="B H n f32",
        inputs=partial(_lookup, "lookup_scores"),
        check=_SCORES,
        sizes="{C:,} codewords",
    ),
)


def _top_places(shape: KernelShape, draw: Draw) -> Any:
    query = draw.normal(shape.batch, shape.query_heads, 1, shape.rank) * shape.scale
    lead = (shape.batch, shape.heads, shape.length)
    rows = draw.normal(*lead, shape.rank, dtype=torch.bfloat16)
    return partial(
        *(proxy.top_indices, query, rows, shape.heads, shape.top_k), valid=draw.all_valid(shape)
    )


def _top_k(shape: KernelShape, draw: Draw) -> Any:
    return partial(top_k, draw.normal(shape.batch, shape.heads, 1, shape.length), shape.top_k)


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
    queries, keys, valid = _bundles(shape, draw), draw.keys(shape), draw.all_valid(shape)
    listed = CTKVR.list_len(shape.length, shape.top_k)

    def pieces() -> Iterator[tuple[int, torch.Tensor]]:
        for start in range(0, shape.length, _PIECE_LEN):
            yield start, keys[:, :, start : start + _PIECE_LEN]

    return partial(centroid.top_keys, queries, pieces, listed, valid=valid, scale=shape.scale)


def _similarity(shape: KernelShape, draw: Draw) -> Any:
    query, centroids = _bundles(shape, draw, 1), _bundles(shape, draw)
    return partial(centroid.similarity, query, centroids, centroids.float().norm(dim=-1) ** -1)


def _bundles(shape: KernelShape, draw: Draw, count: int | None = None) -> torch.Tensor:
    """``[B, H, count, G, D]`` past queries, as many as there are centroids."""
    count = count or CTKVR.centroids_for(shape.length)
    sizes = (shape.batch, shape.heads, count, shape.group, shape.head_dim)
    return draw.normal(*sizes, dtype=shape.dtype)


SEARCH_OPS = (
    # The best tokens of each group by proxies of their keys. Proxies are read once, although a
    # softmax over tokens takes two passes or room for all scores.
    KernelOp(
        name="proxy.top_indices",
        read="B H n r bf16 + B Hq r f32 + B n",
        written="B H K i32",
        products="B Hq n r",
        inputs=_top_places,
        # Of tokens that score nearly the same any may be taken.
        check=(not_shared, 1e-2),
        sizes="rank {r}",
        copies=8,
    ),
    # The highest scores of each KV head.
    KernelOp(
        name="top_k",
        read="B H n f32",
        written="B H K i32",
        inputs=_top_k,
        check=(unequal, 0.0),
        error_of=_top_k_error,
        sizes="top {K:,}",
    ),
    # Lists of the best keys for as many past queries as CTkvr has for that length. Keys are read
    # once, although with several heads in a group they are read for the denominators first.
    KernelOp(
        name="centroid.top_keys",
        read="B H n D x + B H L G D x + B n",
        written="B H L listed i32",
        products="B H L G n D",
        inputs=_top_keys,
        # Keys at the end of a list are nearly as good as those behind it.
        check=(not_shared, 1e-2),
        sizes="{L:,} lists of {listed:,}",
    ),
    # Cosines of a step's query and all centroids, the largest of a group.
    KernelOp(
        name="centroid.similarity",
        read="B H G D x + B H L G D x + B H L G f32",
        written="B H L f32",
        products="B H L G D",
        inputs=_similarity,
        check=_SCORES,
        sizes="{L:,} centroids",
    ),
)
