"""Tensors in several chunks, read as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def select(
    chunks: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """``[N, ...]``: entries of the chunks, counted in order across all of them; a new tensor.

    Args:
        chunks: ``[n_i, ...]`` each, at least one, of one dtype and otherwise one shape. Each is
            read where it lies.
        index: ``[N]`` int64, 0 to the sum of the n_i less 1.
        device: of the result; None for that of ``index``.

    The host waits for ``index`` where there are several chunks.
    """
    device = index.device if device is None else device
    if len(chunks) == 1:
        return chunks[0].index_select(0, index.to(chunks[0].device)).to(device)
    shape = (len(index), *chunks[0].shape[1:])
    result = torch.empty(shape, dtype=chunks[0].dtype, device=device)
    first = 0
    for chunk in chunks:
        inside = ((index >= first) & (index < first + len(chunk))).nonzero()[:, 0]
        part = chunk.index_select(0, (index[inside] - first).to(chunk.device))
        result.index_copy_(0, inside.to(device), part.to(device))
        first += len(chunk)
    return result
