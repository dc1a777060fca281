"""The highest of some scores: where they stand, without a sort."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import check_tensor, run

__all__ = ["top_k"]


def top_k(scores: torch.Tensor, count: int, *, backend: str = "auto") -> torch.Tensor:
    """``[B, H, Q, count]`` int32 positions of the highest scores, in any order.

    Positions that score -inf are never taken: -1 stands for those that are missing. Among equal
    scores the first are taken.

    Args:
        scores: ``[B, H, Q, n]`` fp32 without NaN.
        count: 1 to n.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: scores of another form, or a count out of range.
    """
    check_tensor("scores", scores, (None,) * 4, (torch.float32,))
    if not 1 <= count <= scores.shape[-1]:
        raise ValueError(f"count={count}: 1 to {scores.shape[-1]} of {scores.shape[-1]} tokens")
    return run(__name__, "top_k", backend, scores, count)
