"""What the torch versions share: shares of a softmax."""

from __future__ import annotations

import torch


def log_shares(scores: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
    """Log-softmax over the last dimension; -inf stays -inf, also where all are.

    ``lse [..., 1]`` is the log-sum-exp to take off, where it is not that of ``scores`` themselves.
    """
    lse = scores.logsumexp(-1, keepdim=True) if lse is None else lse
    return scores - lse.masked_fill(lse == float("-inf"), 0.0)
