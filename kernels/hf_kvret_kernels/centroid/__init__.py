"""CTkvr's operations: past queries as centroids, each with a list of its best keys.

A centroid is a bundle: the G query heads of a KV head at one position. ``top_keys`` makes lists,
``similarity`` finds the centroids near a query, ``unite`` joins their lists.

Plain torch on every device. On CUDA tensors nothing waits for the host and no shape depends on
data; there are no Triton versions.

Paper: CTkvr, algorithms 1 and 2. Dimensions: B batch, H KV heads, G query heads of one, C
centroids, Q queries at once, D head dim, n tokens, M ids.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import check_no_grad
from hf_kvret_kernels.centroid import naive
from hf_kvret_kernels.centroid.naive import Pieces

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

__all__ = ["Pieces", "similarity", "top_keys", "unite"]


def top_keys(
    queries: torch.Tensor,
    pieces: Pieces,
    count: int,
    *,
    valid: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    most_scores: int = 1 << 22,
) -> torch.Tensor:
    """``[B, H, C, count]`` int32: for each centroid the best keys, best first, then -1.

    A key is as good as the largest of the softmax weights that the G queries give it (algorithm
    1, lines 2 to 4). The softmax is over the keys that take part. The matrix of all scores never
    exists: keys come in pieces, and each piece meets some centroids at a time. With G > 1 the
    pieces are read twice, first for the denominators.

    Args:
        queries: ``[B, H, C, G, D]`` fp32, bf16 or fp16.
        pieces: gives all keys in order, each time it is called: ``(first slot, keys [B, H, P,
            D])`` on the queries' device.
        count: keys of a list, at least 1; may exceed n.
        valid: ``[B, n]`` bool, any strides; False for tokens that never enter a list.
        scale: factor of the dot products; the paper leaves out ``D ** -0.5``, without which the
            maximum over a group compares other softmaxes than attention's.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        positions: ``[B, C]`` slots of the queries, for a causal mask; None for no mask.
        most_scores: fp32 scores held at once, about; at least those of one centroid and piece.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_no_grad(queries=queries)
    _check_bundles("queries", queries)
    if count < 1:
        raise ValueError(f"count={count}: a list holds at least 1 key")
    _check_valid(valid, queries)
    expected = (queries.shape[0], queries.shape[2])
    if positions is not None and tuple(positions.shape) != expected:
        raise ValueError(f"positions has shape {tuple(positions.shape)}: pass {list(expected)}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: pass a positive number, or None for no cap")
    return naive.top_keys(queries, pieces, count, valid, positions, scale, softcap, most_scores)


def similarity(
    query: torch.Tensor, centroids: torch.Tensor, inverse_norms: torch.Tensor
) -> torch.Tensor:
    """``[B, H, Q, C]`` fp32 cosines, the largest of the group's (algorithm 2, lines 1 and 2).

    Each query head is compared with the same head of the bundle.

    Args:
        query: ``[B, H, Q, G, D]``.
        centroids: ``[B, H, C, G, D]``.
        inverse_norms: ``[B, H, C, G]`` fp32, 1 over the length of each of their vectors.

    Raises:
        ValueError: shapes or devices that do not fit.
    """
    check_no_grad(query=query, centroids=centroids)
    _check_bundles("query", query)
    _check_bundles("centroids", centroids)
    if query.shape[:2] != centroids.shape[:2] or query.shape[3:] != centroids.shape[3:]:
        raise ValueError(
            f"query has shape {tuple(query.shape)}, centroids {tuple(centroids.shape)}: only the "
            "third dimension may differ"
        )
    if inverse_norms.shape != centroids.shape[:4]:
        raise ValueError(
            f"inverse_norms has shape {tuple(inverse_norms.shape)}: pass "
            f"{list(centroids.shape[:4])}"
        )
    return naive.similarity(query, centroids, inverse_norms)


def unite(ids: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids in which each occurs once, and where it was named first (algorithm 2, line 4).

    Args:
        ids: ``[B, H, Q, M]`` int32 or int64; -1 and whatever is above n - 1 name nothing.
        valid: ``[B, n]`` bool, any strides, n at least 1.

    Returns:
        ``ids [B, H, Q, M]`` of the same dtype, ascending with -1 in between for repeats, and for
        what is not valid; ``places [B, H, Q, M]`` int64, where in the input each of them stood.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if ids.ndim != 4 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}: pass int32 [B, H, Q, M]")
    _check_valid(valid, ids)
    if not valid.shape[1]:
        raise ValueError("valid covers no token: there must be one at least")
    return naive.unite(ids, valid)


def _check_bundles(name: str, x: torch.Tensor) -> None:
    if x.ndim != 5 or x.dtype not in _FLOATS:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: pass fp32, bf16 or fp16 [B, H, *, G, D]"
        )


def _check_valid(valid: torch.Tensor, like: torch.Tensor) -> None:
    if valid.dtype != torch.bool or valid.ndim != 2 or len(valid) != len(like):
        raise ValueError(f"valid is {valid.dtype} {tuple(valid.shape)}: pass bool [{len(like)}, n]")
    if valid.device != like.device:
        raise ValueError(f"valid is on {valid.device}, the rest on {like.device}: move it there")
