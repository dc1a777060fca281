"""The highest scores in Triton, in a single launch where these are few."""

from __future__ import annotations

import torch

from hf_kvret_kernels.top_k import triton_best
from hf_kvret_kernels.top_k.triton_split import split_top_k


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.top_k.top_k``.

    Positions ascend, the missing ones are last; of equal scores the first are taken.
    """
    if triton_best.fits(scores.shape[-1], count):
        return triton_best.top_places(scores, count)
    return split_top_k(scores.unsqueeze(3), count)
