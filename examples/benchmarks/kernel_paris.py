"""ParisKV's operations, as ``bench kernels`` measures them, with the defaults of its method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from kernel_inputs import PARIS, Draw, KernelShape
from kernel_work import SCORE_ERROR, KernelOp, distance, not_shared, unequal

from hf_kvret_kernels import paris, relevance

_WEIGHT = torch.bfloat16
_M = PARIS.subspace_dim


def _encode(shape: KernelShape, draw: Draw) -> Any:
    keys, (signs, levels) = draw.keys(shape), _basis(shape, draw)
    mean = draw.normal(shape.batch, shape.heads, shape.head_dim)

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        codes = paris.encode(
            keys, signs, levels, m=_M, mean=mean, weight_dtype=_WEIGHT, backend=backend
        )
        return codes.sign, codes.magnitude, codes.weight

    return run


def _code_error(found: Sequence[Any], want: Sequence[Any]) -> float:
    return max(unequal(found[:2], want[:2]), distance(found[2:], want[2:]))


def _search(shape: KernelShape, draw: Draw) -> Any:
    codes, (signs, levels) = _draw_codes(shape, draw), _basis(shape, draw)
    query = draw.normal(shape.batch, shape.heads, 1, shape.group, shape.head_dim, dtype=shape.dtype)
    counts = paris.count_centroids(codes.sign, m=_M)
    return partial(
        paris.search,
        *(query, signs, codes, counts, levels, shape.top_k),
        survivors=shape.count("best"),
        **_stage_one_options(shape, draw),
    )


def _candidates(shape: KernelShape, draw: Draw) -> Any:
    best, options = shape.count("best"), _stage_one_options(shape, draw)
    return partial(paris.candidates, *_stage_one(shape, draw), best, **options)


def _stage_one(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, ...]:
    sign = _draw_codes(shape, draw).sign
    return _draw_queries(shape, draw), paris.count_centroids(sign, m=_M), sign


def _stage_one_options(shape: KernelShape, draw: Draw) -> dict[str, Any]:
    _, rho = PARIS.ratios(shape.length)
    tiers = PARIS.tiers_for(paris.rotated_dim(shape.head_dim) // _M)
    return {"rho": rho, "tiers": tiers, "m": _M, "valid": draw.all_valid(shape)}


def _rerank(shape: KernelShape, draw: Draw) -> Any:
    codes, queries = _draw_codes(shape, draw), _draw_queries(shape, draw)
    ids, levels = _draw_best(shape, draw), _basis(shape, draw)[1]
    return partial(paris.rerank, queries, codes, ids, levels, m=_M)


def _best_ids(shape: KernelShape, draw: Draw) -> Any:
    scores = draw.normal(shape.batch, shape.heads, 1, shape.group, shape.count("best"))
    return partial(relevance.best_ids, scores, _draw_best(shape, draw), shape.top_k)


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(shape.count("P"), PARIS.seed)
    return signs.to(draw.device), paris.magnitude_levels(_M).to(draw.device)


def _draw_codes(shape: KernelShape, draw: Draw) -> paris.ParisCodes:
    """Of random bytes: the cost of a code does not depend on what it says."""
    lead = (shape.batch, shape.heads, shape.length)
    signs, magnitudes = (
        draw.integers(256, *lead, shape.count(part), dtype=torch.uint8)
        for part in ("signs", "magnitudes")
    )
    weight = draw.normal(*lead, shape.count("S"), dtype=_WEIGHT).abs()
    return paris.ParisCodes(signs, magnitudes, weight)


def _draw_queries(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.batch, shape.heads, 1, shape.group, shape.count("P"))


def _draw_best(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.ids(shape, shape.count("best")).sort(dim=-1).values


PARIS_OPS = (
    # Keys to their codes, the mean key of each head subtracted, as a flush does. The rotation is
    # additions alone, so no multiply-adds count.
    KernelOp(
        name="paris.encode",
        read="B H n D x + B H D f32 + P f32",
        written="B H n signs + B H n magnitudes + B H n S bf16",
        inputs=_encode,
        # Coordinates at the border of two levels go to either, and weights are rounded to bf16.
        check=(_code_error, 1e-2),
        copies=8,
    ),
    # All of a step's search: the tokens that matter most, by the full codes of the candidates.
    KernelOp(
        name="paris.search",
        read="B H n signs + B Hq D x + P f32 + B H S patterns i32 + B n + B H best signs "
        "+ B H best magnitudes + B H best S bf16 + 8 f32",
        written="B H K i32",
        products="B H best G P",
        inputs=_search,
        # Patterns at the border of two tiers go to either.
        check=(not_shared, 1e-2),
        copies=16,
        stored="B H n magnitudes + B H n S bf16",
    ),
    # Its first stage: the tokens with the most points by their sign patterns, of any query head.
    KernelOp(
        name="paris.candidates",
        read="B H n signs + B Hq P f32 + B H S patterns i32 + B n",
        written="B H best i32",
        inputs=_candidates,
        check=(not_shared, 1e-2),
        sizes="{best:,} candidates",
        copies=16,
    ),
    # Its second stage: estimated scores of the candidates, for each query head; 8 levels.
    KernelOp(
        name="paris.rerank",
        read="B H best i32 + B H best signs + B H best magnitudes + B H best S bf16 + B Hq P f32 "
        "+ 8 f32",
        written="B H best G f32",
        products="B H best G P",
        inputs=_rerank,
        check=(distance, SCORE_ERROR),
        sizes="{best:,} candidates",
        # Codes of all tokens.
        stored="B H n signs + B H n magnitudes + B H n S bf16",
    ),
    # The candidates that matter most to any query head of a group.
    KernelOp(
        name="relevance.best_ids",
        read="B H best i32 + B H best G f32",
        written="B H K i32",
        inputs=_best_ids,
        # Of candidates that matter equally any may be taken.
        check=(not_shared, 1e-3),
        sizes="{best:,} candidates",
        copies=16,
    ),
)
