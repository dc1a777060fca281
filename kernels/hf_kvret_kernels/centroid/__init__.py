"""CTkvr's operations: past queries as centroids, each with a list of its best keys.

A centroid is a bundle: the G query heads of a KV head at one position. ``key_lists`` makes lists,
``similarity`` finds the centroids near the ``units`` of a query, ``take_lists`` unpacks theirs,
``unite`` leaves out repeats. On CUDA tensors nothing waits for the host and no shape depends on
data.

Paper: CTkvr, algorithms 1 and 2. Dimensions: B batch, H KV heads, G query heads of one, C
centroids, Q queries at once, D head dim, n tokens, M ids, rho ids of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_kvret_kernels._dispatch import (
    FLOATS,
    check_no_grad,
    check_softcap,
    check_tensor,
    check_valid,
    choose_backend,
    launching_on,
    run,
)
from hf_kvret_kernels.centroid import naive
from hf_kvret_kernels.centroid.naive import KeyChunks

__all__ = ["KeyChunks", "key_lists", "similarity", "take_lists", "top_keys", "unite", "units"]


def key_lists(
    queries: torch.Tensor,
    chunks: KeyChunks,
    count: int,
    *,
    valid: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Iterator[torch.Tensor]:
    """``[B, H, c, count]`` int32 each, of all centroids in order: the best keys, then -1.

    A list has its best key first. A key is as good as the largest of the softmax weights that the
    G queries give it (algorithm 1, lines 2 to 4). The softmax is over the keys that take part. The
    matrix of all scores never exists: keys come in chunks, and some centroids meet them at a time.
    Triton reads the chunks once more for the denominators, where G > 1. Of equal keys any may be
    listed; Triton lists the first.

    With torch the scores of all keys by 128 queries of a head are held, about 640 bytes a token;
    few centroids have those of all heads held, and all chunks are read for each such group, at most
    eight times. For more, the keys are copied once. What is not yet taken doesn't exist, and what
    was taken may be packed or dropped. Triton makes all lists together.

    Args:
        queries: ``[B, H, C, G, D]`` fp32, bf16 or fp16.
        chunks: gives all keys in order, each time it is called: ``(first slot, keys [B, H, P,
            D])`` on the queries' device, of any of these dtypes.
        count: keys of a list, at least 1; may exceed n.
        valid: ``[B, n]`` bool, any strides; False for tokens that never enter a list.
        scale: factor of the dot products; the paper leaves out ``D ** -0.5``, without which the
            maximum over a group compares other softmaxes than attention's.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, also of a chunk.
    """
    check_no_grad(queries=queries)
    check_tensor("queries", queries, (None,) * 5, FLOATS)
    if count < 1:
        raise ValueError(f"count={count}: a list holds at least 1 key")
    check_valid(valid, (len(queries), None), queries.device)
    check_softcap(softcap)

    def check_chunks() -> Iterator[tuple[int, torch.Tensor]]:
        for start, keys in chunks():
            _check_chunk(start, keys, queries, valid)
            yield start, keys
            # The chunk must not be in memory while the next one is made.
            del keys

    if queries.is_meta:
        # Without contents all keys are alike: the form alone.
        return iter((queries.new_empty((*queries.shape[:3], count), dtype=torch.int32),))
    arguments = queries, check_chunks, count, naive.Scoring(valid, scale, softcap)
    if choose_backend(backend, queries) == "naive":
        return naive.key_lists(*arguments)
    from hf_kvret_kernels.centroid import triton

    with launching_on(queries):
        return iter((triton.top_keys(*arguments),))


def top_keys(queries: torch.Tensor, chunks: KeyChunks, count: int, **options: Any) -> torch.Tensor:
    """``[B, H, C, count]`` int32: all ``key_lists`` in one tensor. Arguments are the same."""
    parts = list(key_lists(queries, chunks, count, **options))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def units(
    queries: torch.Tensor, metric: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries for ``similarity``, in fp32, and 1 over their lengths ``[B, H, C, G]``.

    The inner product with the first of a query and any other is that in the metric, over the
    query's length in it. Where the metric is the covariance of keys, a cosine is the correlation of
    what two queries score over these keys.

    Args:
        queries: ``[B, H, C, G, D]`` fp32, bf16 or fp16.
        metric: ``[B, H, D, D]`` fp32, symmetric; None: the dot product.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_no_grad(queries=queries)
    check_tensor("queries", queries, (None,) * 5, FLOATS)
    queries = images = queries.float()
    if metric is not None:
        form = (*queries.shape[:2], queries.shape[-1], queries.shape[-1])
        check_tensor("metric", metric, form, (torch.float32,), queries.device)
        images = (queries.flatten(2, 3) @ metric).view(queries.shape)
    inverse = (queries * images).sum(-1).clamp_(min=1e-24).rsqrt_()
    return images * inverse.unsqueeze(-1), inverse


def similarity(
    query: torch.Tensor,
    centroids: torch.Tensor,
    inverse_lengths: torch.Tensor,
    *,
    largest: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, C]`` fp32: the mean of the group's cosines.

    Each query head is compared with the same head of the bundle. Triton rounds a query to the dtype
    of the centroids.

    Args:
        query: ``[B, H, Q, G, D]`` fp32, ``units`` of a query.
        centroids: ``[B, H, C, G, D]`` fp32, bf16 or fp16.
        inverse_lengths: ``[B, H, C, G]`` fp32, of ``units`` of them.
        largest: the largest in place of the mean (algorithm 2, line 2).
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_no_grad(query=query, centroids=centroids)
    check_tensor("query", query, (None,) * 5, (torch.float32,))
    bundles, device = (*query.shape[:2], None, *query.shape[3:]), query.device
    check_tensor("centroids", centroids, bundles, FLOATS, device)
    check_tensor("inverse_lengths", inverse_lengths, centroids.shape[:4], (torch.float32,), device)
    return run(__name__, "similarity", backend, query, centroids, inverse_lengths, largest)


def take_lists(
    low: torch.Tensor, high: torch.Tensor | None, index: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """``[B, H, Q, c, rho]`` int32: the lists of the centroids that ``index`` names, unpacked.

    An id is kept as itself plus 1, so that 0 is none and comes out as -1.

    Args:
        low: ``[B, H, m, rho]`` int16, the low 16 bits, any strides.
        high: ``[B, H, m, rho]`` uint8, the 8 bits above, or None for 0.
        index: ``[B, H, Q, c]`` int64, 0 to m - 1. For others torch raises and Triton gives -1.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_tensor("low", low, (None,) * 4, (torch.int16,))
    if high is not None:
        check_tensor("high", high, low.shape, (torch.uint8,), low.device)
    check_tensor("index", index, (*low.shape[:2], None, None), (torch.int64,), low.device)
    return run(__name__, "take_lists", backend, low, high, index)


def unite(ids: torch.Tensor, valid: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Ids in which each occurs once, where it was named first (algorithm 2, line 4).

    Args:
        ids: ``[B, H, Q, M]`` int32 or int64; -1 and whatever is above n - 1 name nothing.
        valid: ``[B, n]`` bool, any strides, n at least 1.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Returns:
        ``[B, H, Q, M]`` of the same dtype and order, -1 in the place of repeats and of what is not
        valid.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    A table of fp32's size for each token and query is held meanwhile, at most about 64 MiB, or
    those of one query and each KV head with torch.
    """
    check_tensor("ids", ids, (None,) * 4, (torch.int32, torch.int64))
    check_valid(valid, (len(ids), None), ids.device)
    if not valid.shape[1]:
        raise ValueError("valid covers no token: there must be one at least")
    return run(__name__, "unite", backend, ids, valid)


def _check_chunk(
    start: int, keys: torch.Tensor, queries: torch.Tensor, valid: torch.Tensor
) -> None:
    batch, heads, _, _, width = queries.shape
    shape, name = (batch, heads, None, width), f"the chunk of slot {start}"
    check_tensor(name, keys, shape, FLOATS, queries.device)
    if start < 0 or start + keys.shape[2] > valid.shape[1]:
        raise ValueError(
            f"a chunk has the slots {start} to {start + keys.shape[2] - 1}: valid covers 0 to "
            f"{valid.shape[1] - 1}"
        )
