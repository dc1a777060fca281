"""The highest scores in Triton, in a single launch where one program holds them all."""

from __future__ import annotations

import torch

from hf_kvret_kernels.top_k import triton_block
from hf_kvret_kernels.top_k.triton_radix import radix_top_k


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.top_k.top_k``.

    Positions ascend, the missing ones are last; of equal scores the first are taken.
    """
    if scores.shape[-1] <= triton_block.MOST:
        return triton_block.top_places(scores, count)
    return radix_top_k(scores, count)
