"""How much tokens matter to the query heads that select together, and the best of them.

Raw scores of different heads are not comparable: each softmax has a scale of its own. So a token
matters as much as the largest of the softmax weights that the heads of a group give it.
Dimensions: B batch, Hq query heads, H selecting heads, G = Hq / H, Q queries at once, n tokens.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import check_no_grad, check_tensor, run
from hf_kvret_kernels.relevance import naive

__all__ = ["best_ids", "count_ids", "group_relevance", "host_rank", "top_indices"]


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
    return run(__name__, "group_relevance", backend, scores, heads)


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
    return run(__name__, "top_indices", backend, scores, heads, count)


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
    return run(__name__, "best_ids", backend, scores, ids, count)


def host_rank(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best of some tokens, best first, then -1: ``[B, H, Q, count]`` int32.

    By the compiled library where there is one, else by torch, on the CPU. Of tokens that matter
    equally the first named comes first. Tokens whose score is NaN or -inf are never chosen.

    Args:
        scores: ``[B, Hq, Q, K]`` fp32, as ``gather_scores`` gives them.
        ids: ``[B, H, Q, K]`` int32, -1 for none; Hq is a multiple of H.
        count: at least 0; may exceed K.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        MemoryError: no room for the library's work space.
    """
    cpu = torch.device("cpu")
    check_tensor("ids", ids, (None,) * 4, (torch.int32,), cpu)
    batch, heads, queries, named = ids.shape
    check_tensor("scores", scores, (batch, None, queries, named), (torch.float32,), cpu)
    if not heads or not scores.shape[1] or scores.shape[1] % heads:
        raise ValueError(f"scores has {scores.shape[1]} heads: pass a multiple of {heads}, of ids")
    if count < 0:
        raise ValueError(f"count={count}: pass 0 or more")
    if host_library.why_not():
        return naive.host_rank(scores, ids, count)
    best = ids.new_empty(batch, heads, queries, count)
    host_library.rank(scores, ids, best)
    return best


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
    run(__name__, "count_ids", backend, ids, total)


def _check_scores(scores: torch.Tensor, heads: int) -> None:
    """ValueError unless they are what ``group_relevance`` takes."""
    check_no_grad(scores=scores)
    check_tensor("scores", scores, (None,) * 4, (torch.float32,))
    if heads < 1 or scores.shape[1] % heads:
        raise ValueError(f"heads={heads}: must divide the {scores.shape[1]} query heads")
