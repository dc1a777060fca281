"""The two-stage search: collision points, candidates, rerank (ParisKV, section 4.2.2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hf_kvret_kernels._dispatch import (
    check_no_grad,
    check_softcap,
    check_tensor,
    check_valid,
    run,
)
from hf_kvret_kernels.paris.codes import (
    EXCLUDED,
    LEVELS,
    MOST_SIMILAR,
    SHARE_UNIT,
    ParisCodes,
    SearchCall,
    check_codes,
    check_rotated,
    check_rows,
    check_signs,
    has_similarities,
)


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
    valid: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    means: torch.Tensor | None = None,
    block_len: int = 1,
    samples: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: the tokens that matter most by their codes, -1 for missing ones.

    Candidates are the ``survivors`` tokens with the most points, of equal ones the last.
    ``scale * <k, q>`` of these is estimated from their codes, as the paper's eq. 10 does,
    and ``relevance.best_ids`` takes the best. ``paris.naive`` says what is computed, stage after
    stage; Triton shares work between them.

    Args:
        query: ``[B, H, Q, G, D]`` of any float dtype, contiguous or not.
        signs: ``[P]`` fp32 of the rotation, or ``[B, H, P]`` of ``scaled_signs``; None for queries
            that are ``[B, H, Q, G, P]`` fp32 in the coordinates of the codes already.
        codes: of n tokens.
        counts: ``[B, H, S, 256]`` int32 of ``count_centroids``.
        levels: ``[8]`` fp32, the levels that ``encode`` was given.
        count: tokens to find, 1 to ``survivors``.
        survivors: candidates that stage 1 leaves, up to n.
        rho: share of the keys that earn points in a subspace, in (0, 1].
        tiers: shares of ``rho``, each in (0, 1]; at most 254 / S of them, as the sum of
            points must stay below 255. Empty: points are by similarity, whatever ``rho`` and
            ``counts``, for at most 36 subspaces.
        valid: ``[B, n]`` bool, any strides, or None for all valid.
        scale: factor of the inner products, before the cap.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        means: ``[B, H, blocks, D]`` fp32: what was subtracted from the keys of each block before
            they were coded; None for nothing. Its product counts in both stages, in stage 1 for
            rotated keys whose numbers have a root mean square of about 1.
        block_len: tokens of a block, a power of two; ``blocks`` of them hold all n.
        samples: ``[B, H, s, D]`` fp32 keys, s above 0, beside ``means``. They tell which logits a
            query's selection reaches, and points of a group's queries count from there. For points
            by similarity and a ``scale`` above 0. None: each query's points count by themselves.
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
    device = codes.sign.device
    if query.dim() != 5 or not query.shape[3]:
        raise ValueError(f"query has shape {tuple(query.shape)}: pass [B, H, Q, G, D], G above 0")
    if signs is not None:
        check_signs(query, signs if signs.dim() == 1 else signs[0, 0])
        dim = signs.shape[-1]
    else:
        dim = query.shape[-1]
        check_no_grad(query=query)
        check_tensor("query", query, query.shape, [torch.float32], device)
        check_rotated("query", dim)
    batch, heads, subspaces = *query.shape[:2], dim // 8
    check_tensor("counts", counts, (batch, heads, subspaces, 256), [torch.int32], device)
    if not 0 < rho <= 1:
        raise ValueError(f"rho={rho}: a share above 0 and at most 1")
    if not all(0 < tier <= 1 for tier in tiers):
        raise ValueError(f"tiers={tuple(tiers)}: each above 0 and at most 1")
    if not tiers and not has_similarities(subspaces):
        raise ValueError(
            f"no tiers and {subspaces} subspaces: points by similarity are for at most "
            f"{(EXCLUDED - 1) // MOST_SIMILAR} subspaces; pass tiers"
        )
    if len(tiers) * subspaces >= EXCLUDED:
        fit = (EXCLUDED - 1) // subspaces
        raise ValueError(
            f"scores of {_tiers(len(tiers))} in {subspaces} subspaces go above {EXCLUDED - 1}, "
            f"which a byte can't hold; use at most {_tiers(fit)}"
        )
    check_tensor("codes.sign", codes.sign, (batch, heads, length, dim // 8), [torch.uint8])
    check_codes(codes, dim, device)
    check_valid(valid, (batch, length), device)
    check_tensor("levels", levels, (LEVELS,), [torch.float32], device)
    if block_len < 1 or block_len & (block_len - 1):
        raise ValueError(f"block_len={block_len}: pass a power of two, the tokens of a mean key")
    if means is not None:
        shape = batch, heads, -(-length // block_len), query.shape[4]
        check_tensor("means", means, shape, [torch.float32], device)
    if samples is not None:
        if means is None or tiers or not scale > 0 or not samples.numel():
            raise ValueError("samples: pass some, means, no tiers and a scale above 0; or None")
        shape = batch, heads, samples.shape[2], query.shape[4]
        check_tensor("samples", samples, shape, [torch.float32], device)
    check_softcap(softcap)
    call = SearchCall(
        *(query, signs, codes, counts, levels, count, survivors, share_units(rho, tiers), valid),
        *(scale, softcap, means, block_len, samples),
    )
    return search_unchecked(call, backend)


def search_unchecked(call: SearchCall, backend: str = "auto") -> torch.Tensor:
    """``search`` for a caller whose tensors fit each other by how they were made."""
    return run(__package__, "search", backend, call, on=call.query)


def count_centroids(
    sign: torch.Tensor, *, valid: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """``[B, H, S, 256]`` int32: how many valid tokens hold each centroid of each subspace.

    Counts of disjoint blocks of tokens add up, and those of dropped tokens may be subtracted.

    Args:
        sign: ``[B, H, n, P // 8]`` uint8, ``ParisCodes.sign``.
        valid: ``[B, n]`` bool, any strides, or None for all valid.
        backend: "auto", "naive" or "triton".
    """
    check_tensor("sign", sign, (None,) * 4, [torch.uint8])
    check_rotated("sign", sign.shape[-1] * 8)
    check_rows("sign", sign)
    check_valid(valid, (sign.shape[0], sign.shape[2]), sign.device)
    return run(__package__, "count_centroids", backend, sign, valid, triton="triton_encode")


def share_units(rho: float, tiers: Sequence[float]) -> tuple[int, ...]:
    """The tiers' shares of all keys, ``rho * t`` each, in units of 1 / SHARE_UNIT."""
    return tuple(round(rho * tier * SHARE_UNIT) for tier in tiers)


@functools.cache
def tier_shares(rho: float, tiers: tuple[float, ...]) -> torch.Tensor:
    """``[tiers]`` int64 on the CPU, not to be written to: each ``rho * t`` in millionths."""
    with torch.inference_mode(False):
        return torch.tensor(share_units(rho, tiers), dtype=torch.int64, device="cpu")


def _tiers(count: int) -> str:
    return f"{count} tier" if count == 1 else f"{count} tiers"
