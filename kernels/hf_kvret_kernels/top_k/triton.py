"""The highest scores in Triton, in a single launch where these are few."""

from __future__ import annotations

import torch

from hf_kvret_kernels import _ahead as ahead
from hf_kvret_kernels.top_k import triton_best, triton_split
from hf_kvret_kernels.top_k.triton_split import split_top_k


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.top_k.top_k``.

    Positions ascend, the missing ones are last; of equal scores the first are taken.
    """
    rows = scores.unsqueeze(3)
    compile_ahead(rows, count)
    if triton_best.fits(scores.shape[-1], count):
        return triton_best.top_places(scores, count)
    return split_top_k(rows, count)


def compile_ahead(
    scores: torch.Tensor,
    count: int,
    ids: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    most_pieces: int | None = None,
    in_one: bool = True,
) -> None:
    """Compile what choosing among more scores will launch, where somebody asked for it.

    Args:
        scores, count, ids, sums: as of ``split_top_k``.
        most_pieces: of ``sums``, if it is known.
        in_one: whether a single launch chooses among few scores.
    """
    growth = ahead.growth()
    if growth is None:
        return
    choices = growth.choices(scores.shape[4], count)
    if in_one:
        triton_best.compile_ahead(scores, ids, sums, choices)
        choices = [choice for choice in choices if not triton_best.fits(*choice)]
    pieces = {triton_split.pieces_of(length) for length, _ in choices}
    if sums is None:
        pieces = {0} if pieces else set()
    elif most_pieces is not None:
        pieces = {min(most_pieces, each) for each in pieces}
    for each in pieces:
        triton_split.compile_ahead(scores, ids, sums, each)
