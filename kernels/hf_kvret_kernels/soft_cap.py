"""The soft cap of attention logits, in torch; kernels have it built in."""

from __future__ import annotations

import torch


def soft_cap_(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap * tanh(scores / cap)``, in place; as they are where ``cap`` is None."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
