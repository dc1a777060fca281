"""Pieces that the torch versions share: soft caps, and shares of a softmax."""

from __future__ import annotations

import torch


def soft_cap_(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap * tanh(scores / cap)``, in place; as they are where ``cap`` is None."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def log_shares(scores: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
    """Log-softmax over the last dimension; -inf stays -inf, also where all are.

    ``lse [..., 1]`` is the log-sum-exp to take off, where it is not that of ``scores`` themselves.
    """
    lse = scores.logsumexp(-1, keepdim=True) if lse is None else lse
    return scores - lse.masked_fill(lse == float("-inf"), 0.0)
