"""Both stages of the search in one operation (ParisKV, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvret_kernels._dispatch import choose_backend, launching_on
from hf_kvret_kernels.paris.codes import ParisCodes
from hf_kvret_kernels.paris.encoding import check_signs, rotate
from hf_kvret_kernels.paris.selection import (
    candidates,
    check_queries,
    check_stage_one,
    check_stage_two,
    rerank,
)
from hf_kvret_kernels.relevance import best_ids


def search(
    query: torch.Tensor,
    signs: torch.Tensor | None,
    codes: ParisCodes,
    counts: torch.Tensor,
    levels: torch.Tensor,
    count: int,
    *,
    survivors: int,
    rho: float,
    tiers: Sequence[float],
    m: int = 8,
    valid: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    offset: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: the tokens that matter most by their codes, -1 for missing ones.

    ``rotate``, ``candidates``, ``rerank`` and ``relevance.best_ids`` one after the other, which say
    what is computed; Triton shares work between them.

    Args:
        query: ``[B, H, Q, G, D]`` of any float dtype, contiguous or not.
        signs: ``[P]`` fp32 of the rotation; None for queries that are ``[B, H, Q, G, P]`` fp32 in
            the coordinates of the codes already.
        codes: of n tokens.
        counts: ``[B, H, S, 2**m]`` int32 of ``count_centroids``.
        levels: ``[8]`` fp32, the levels that ``encode`` was given.
        count: tokens to find, 1 to ``survivors``.
        survivors: candidates that stage 1 leaves, up to n.
        rho, tiers, m, valid: as of ``collisions``.
        scale, softcap, offset: as of ``rerank``.
        backend: "auto", "naive" or "triton".

    Raises:
        ValueError: a number out of range, tensors that do not fit, gradients.
    """
    length = codes.sign.shape[2]
    if not 1 <= count <= survivors <= length:
        raise ValueError(
            f"count={count}, survivors={survivors}: 1 <= count <= survivors <= {length}, the "
            "number of tokens"
        )
    if query.dim() != 5:
        raise ValueError(f"query has shape {tuple(query.shape)}, expected [B, H, Q, G, D]")
    sign = codes.sign
    if choose_backend(backend, query) == "naive":
        q_rot = query if signs is None else rotate(query, signs, backend=backend)
        ids = candidates(
            *(q_rot, counts, sign, survivors),
            rho=rho,
            tiers=tiers,
            m=m,
            valid=valid,
            backend=backend,
        )
        scores = rerank(
            *(q_rot, codes, ids, levels),
            m=m,
            scale=scale,
            softcap=softcap,
            offset=offset,
            backend=backend,
        )
        return best_ids(scores, ids, count, backend=backend)
    from hf_kvret_kernels.paris import triton_search

    if signs is None:
        check_queries(query, sign.device)
    else:
        check_signs(query, signs)
    dim = query.shape[-1] if signs is None else len(signs)
    shape = torch.Size((*query.shape[:-1], dim))
    shares = check_stage_one(shape, counts, sign, rho, tiers, m, valid)
    check_stage_two(shape, codes, levels, m, softcap, offset)
    with launching_on(query):
        return triton_search.search(
            *(query, signs, codes, counts, levels, count, survivors, shares, m, valid),
            *(scale, softcap, offset),
        )
