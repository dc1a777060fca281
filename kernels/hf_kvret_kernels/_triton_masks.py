"""Masks ``[B, n]`` of valid tokens as arguments of kernels, which may go without one."""

from __future__ import annotations

import torch


def mask_bytes(valid: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The mask as bytes; where there is none ``unread``, since an argument must be some pointer."""
    return unread if valid is None else valid.view(torch.uint8)


def mask_strides(valid: torch.Tensor | None) -> tuple[int, int]:
    """Strides of rows of the batch and of tokens; zeros where there is no mask."""
    return (0, 0) if valid is None else (valid.stride(0), valid.stride(1))
