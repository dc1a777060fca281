"""How much tokens matter to the query heads that select together, and the best of them.

Raw scores of different heads are not comparable: each softmax has a scale of its own. So a token
matters as much as the largest of the softmax weights that the heads of a group give it.
Dimensions: B batch, Hq query heads, H selecting heads, G = Hq / H, Q queries at once, n tokens.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import (
    check_no_grad,
    check_tensor,
    choose_backend,
    launching_on,
)
from hf_kvret_kernels.relevance import naive

__all__ = ["best_ids", "count_ids", "group_relevance", "top_indices"]


def group_relevance(scores: torch.Tensor, heads: int, *, backend: str = "auto") -> torch.Tensor:
    """``[B, H, Q, n]`` fp32: the largest of the log-softmaxes over tokens of a group's heads.

    At most 0; -inf stays -inf for tokens that take no part.

    Args:
        scores: ``[B, Hq, Q, n]`` fp32 attention logits, finite or, for tokens that take no part,
            -inf.
        heads: H, a divisor of Hq.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: scores of another form, heads that do not divide, gradients.
    """
    _check_scores(scores, heads)
    if choose_backend(backend, scores) == "naive":
        return naive.group_relevance(scores, heads)
    from hf_kvret_kernels.relevance import triton

    with launching_on(scores):
        return triton.group_relevance(scores, heads)


def top_indices(
    scores: torch.Tensor, heads: int, count: int, *, backend: str = "auto"
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: indices of the tokens that matter most to a group's heads.

    They ascend; of tokens that matter equally the first are taken. Tokens that score -inf with all
    heads are never taken: -1 stands for those that are missing, behind the others.

    Args:
        scores, heads: as of ``group_relevance``.
        count: 1 to n.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: as ``group_relevance``, and a count out of range.
    """
    _check_scores(scores, heads)
    if not 1 <= count <= scores.shape[-1]:
        raise ValueError(f"count={count}: 1 to {scores.shape[-1]} of {scores.shape[-1]} tokens")
    if choose_backend(backend, scores) == "naive":
        return naive.top_indices(scores, heads, count)
    from hf_kvret_kernels.relevance import triton

    with launching_on(scores):
        return triton.top_indices(scores, heads, count)


def best_ids(
    scores: torch.Tensor, ids: torch.Tensor, count: int, *, backend: str = "auto"
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: those of ``ids`` that matter most to a group's heads.

    They keep the order that they have in ``ids``; of candidates that matter equally any may be
    taken. Candidates that score -inf with all heads are never taken: -1 stands for those that are
    missing, behind the others.

    Args:
        scores: ``[B, H, Q, G, n]`` fp32 attention logits of n candidates, finite or, for those
            that take no part, -inf.
        ids: ``[B, H, Q, n]`` int32 of the candidates.
        count: 1 to n.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: tensors that do not fit, a count out of range, gradients.
    """
    check_no_grad(scores=scores)
    if scores.ndim != 5 or scores.dtype != torch.float32 or not scores.shape[3]:
        raise ValueError(
            f"scores is {scores.dtype} {tuple(scores.shape)}: pass fp32 [B, H, Q, G, n], G above 0"
        )
    shape = (*scores.shape[:3], scores.shape[4])
    check_tensor("ids", ids, shape, (torch.int32,), scores.device)
    if not 1 <= count <= shape[-1]:
        raise ValueError(f"count={count}: 1 to {shape[-1]} of {shape[-1]} candidates")
    if choose_backend(backend, scores) == "naive":
        return naive.best_ids(scores, ids, count)
    from hf_kvret_kernels.relevance import triton

    with launching_on(scores):
        return triton.best_ids(scores, ids, count)


def count_ids(ids: torch.Tensor, total: torch.Tensor, *, backend: str = "auto") -> None:
    """Add the number of ``ids`` that are not -1 to ``total``, in place.

    Args:
        ids: int32 or int64 of any shape.
        total: int64 of one element, on the device of ``ids``; changed.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: dtypes, a device or a shape that do not fit.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids is {ids.dtype}: pass int32 or int64")
    if total.dtype != torch.int64 or total.numel() != 1 or total.device != ids.device:
        raise ValueError(
            f"total is {total.dtype} {tuple(total.shape)} on {total.device}: pass one int64 on "
            f"{ids.device}"
        )
    if choose_backend(backend, ids) == "naive":
        naive.count_ids(ids, total)
        return
    from hf_kvret_kernels.relevance import triton

    with launching_on(ids):
        triton.count_ids(ids, total)


def _check_scores(scores: torch.Tensor, heads: int) -> None:
    """ValueError unless they are what ``group_relevance`` takes."""
    check_no_grad(scores=scores)
    if scores.ndim != 4 or scores.dtype != torch.float32:
        raise ValueError(f"scores is {scores.dtype} {tuple(scores.shape)}: pass fp32 [B, Hq, Q, n]")
    if heads < 1 or scores.shape[1] % heads:
        raise ValueError(f"heads={heads}: must divide the {scores.shape[1]} query heads")
