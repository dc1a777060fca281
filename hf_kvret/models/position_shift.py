"""The shift of positions behind pictures, by the length to which a text may be cut.

Vision models number the tokens of a picture by its rows and columns, so that text behind it goes on
from a position that is not the count of tokens. The shift is what ``rope_deltas`` is for the text
so far: its highest position, plus one, minus its tokens.
"""

from __future__ import annotations

import torch

UNKNOWN = torch.iinfo(torch.int32).min
"""In place of a shift: a cut there goes through a picture, and text has no position behind it."""

_AXES = 3


def shifts(
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    start: int,
    before: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """The shift for each length from ``start`` on: ``[rows, n + 1]`` int32, where positions are.

    Reads nothing on the host.

    Args:
        positions: of ``n`` tokens: ``[B, n]``, or ``[axes, B, n]``, of which the last three count;
            ``B`` is ``rows`` or 1.
        mask: ``[rows, start + n]``, 0 for padding; None where there is none.
        start: tokens before these.
        before: ``[rows, 1]``, the shift before them; None for 0.
        rows: of the batch.
    """
    axes = (positions if positions.ndim == 3 else positions[None])[-_AXES:].long()
    axes = axes.expand(-1, rows, -1)
    end = start + axes.shape[2]
    if mask is None:
        seen = torch.ones(rows, end, dtype=torch.bool, device=axes.device)
    else:
        seen = (mask != 0).to(axes.device)
    # Tokens of a row before each slot from `start` on, and in all.
    tokens = torch.nn.functional.pad(seen.cumsum(1), (1, 0))[:, start:]
    seen = seen[:, start:]
    first = tokens[:, :1] - 1 + (0 if before is None else before.to(axes.device))
    # The highest position before each token, and in all.
    highest = torch.cat([first, torch.where(seen, axes.amax(0), first)], 1).cummax(1).values
    lowest = axes.amin(0)
    inside = seen & ((lowest <= highest[:, :-1]) | (lowest != axes.amax(0)))
    result = highest + 1 - tokens
    # The first token that a cut takes away tells where the next one would stand.
    result[:, :-1] = torch.where(seen, lowest - tokens[:, :-1], result[:, :-1])
    result[:, :-1].masked_fill_(inside, UNKNOWN)
    return result.to(torch.int32)
