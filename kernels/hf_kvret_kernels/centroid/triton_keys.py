"""Which keys count for a centroid, and pieces of keys as the Triton kernels of lists read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels.centroid.naive import Pieces


@dataclass(frozen=True, eq=False)
class KeyMask:
    """Which keys count for which centroids.

    Attributes:
        valid: ``[B, n]`` bool.
        positions: ``[B, C]``, the last slot that a centroid sees, or None.
    """

    valid: torch.Tensor
    positions: torch.Tensor | None

    def arguments(self, part: slice) -> tuple[Any, ...]:
        """Of a kernel, for the centroids ``part``; it ignores the last three where all see all."""
        valid = self.valid.view(torch.uint8)
        limits = valid if self.positions is None else self.positions[:, part]
        return valid, *valid.stride(), limits, *limits.stride()


def whole_pieces(pieces: Pieces) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces that are not empty, their keys contiguous in the last dimension."""
    for start, keys in pieces():
        if keys.shape[2]:
            yield start, keys if keys.stride(3) == 1 else keys.contiguous()


@triton.jit
def counted_keys(  # type: ignore[no-untyped-def]
    valid_ptr,
    valid_stride_n,
    limits,
    slots,
    inside,
    CAUSAL: tl.constexpr,
):
    """``[M, N]`` or ``[1, N]``: which keys count for which rows; ``limits [M]`` with CAUSAL."""
    score_mask = inside & (tl.load(valid_ptr + slots * valid_stride_n, mask=inside, other=0) != 0)
    score_mask = score_mask[None, :]
    if CAUSAL:
        score_mask = score_mask & (slots[None, :] <= limits[:, None])
    return score_mask
