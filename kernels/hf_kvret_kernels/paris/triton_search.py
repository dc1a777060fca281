"""Both stages of a search in Triton kernels, which leave to one another what they have in hand."""

from __future__ import annotations

import torch

from hf_kvret_kernels.paris import (
    triton_bonus,
    triton_candidates,
    triton_collide,
    triton_rerank,
)
from hf_kvret_kernels.paris.codes import ParisCodes
from hf_kvret_kernels.paris.selection import most_points
from hf_kvret_kernels.relevance import triton_shares


def search(
    query: torch.Tensor,
    signs: torch.Tensor | None,
    codes: ParisCodes,
    counts: torch.Tensor,
    levels: torch.Tensor,
    count: int,
    survivors: int,
    shares: tuple[int, ...],
    m: int,
    valid: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    offset: torch.Tensor | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.paris.search``; ``shares`` as of ``selection.check_stage_one``."""
    points = most_points(shares, counts)
    bonus = triton_bonus.bonus(query, signs, counts, shares, m)
    found = triton_collide.collide(bonus, codes.sign, m, valid, points, survivors)
    ids = triton_candidates.compact(found, survivors)
    estimates = triton_rerank.rerank(bonus.queries, codes, ids, levels, m, scale, softcap, offset)
    return triton_shares.best_ids(estimates.scores, ids, count, estimates.log_sums, bonus.tickets)
