"""ParisKV's operations, as ``bench kernels`` measures them, with the defaults of its method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hf_kvret.benchmark.kernels_inputs import Draw, KernelShape
from hf_kvret.benchmark.kernels_work import (
    FP32_BYTES,
    ID_BYTES,
    KernelOp,
    distance,
    not_shared,
    unequal,
)
from hf_kvret.methods.paris import ParisConfig
from hf_kvret_kernels import paris, relevance

_WEIGHT = torch.bfloat16
_HISTOGRAM_BYTES = 256 * 4
_CONFIG = ParisConfig()
_M = _CONFIG.subspace_dim


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


def _collisions(shape: KernelShape, draw: Draw, **more: Any) -> Any:
    sign, queries = _draw_codes(shape, draw).sign, _draw_queries(shape, draw)
    counts = paris.count_centroids(sign, m=_M)
    given = {"rho": _CONFIG.ratios(shape.length)[1], "tiers": _CONFIG.tiers, "m": _M}
    return partial(paris.collisions, queries, counts, sign, **given, **more)


def _best(shape: KernelShape, draw: Draw) -> Any:
    points, histogram = _collisions(shape, draw)()
    return partial(paris.candidates, points, histogram, _candidates(shape))


def _rerank(shape: KernelShape, draw: Draw) -> Any:
    codes, queries = _draw_codes(shape, draw), _draw_queries(shape, draw)
    ids, levels = _draw_candidates(shape, draw), _basis(shape, draw)[1]
    return partial(paris.rerank, queries, codes, ids, levels, m=_M)


def _best_ids(shape: KernelShape, draw: Draw) -> Any:
    scores = draw.normal(shape.batch, shape.heads, 1, shape.group, _candidates(shape))
    return partial(relevance.best_ids, scores, _draw_candidates(shape, draw), shape.top_k)


def _width(shape: KernelShape) -> int:
    """P, the head dim as it is rotated."""
    return paris.rotated_dim(shape.head_dim)


def _query_bytes(shape: KernelShape) -> int:
    """The rotated queries ``[B, H, 1, G, P]`` in fp32."""
    return shape.queries * _width(shape) * FP32_BYTES


def _code_bytes(shape: KernelShape) -> int:
    """Of a token and KV head: a bit of sign and three of magnitude a coordinate, a bf16 weight a
    subspace."""
    return _width(shape) // 2 + _width(shape) // _M * _WEIGHT.itemsize


def _candidates(shape: KernelShape) -> int:
    """As many as the method takes of that many cold tokens."""
    beta, _ = _CONFIG.ratios(shape.length)
    return min(shape.length, max(shape.top_k, math.ceil(beta * shape.length)))


def _all_candidates(shape: KernelShape) -> int:
    return shape.all_heads * _candidates(shape)


def _candidates_of(shape: KernelShape) -> str:
    return f"{_candidates(shape):,} candidates"


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(_width(shape), _CONFIG.seed)
    return signs.to(draw.device), paris.magnitude_levels(_M).to(draw.device)


def _draw_codes(shape: KernelShape, draw: Draw) -> paris.ParisCodes:
    """Of random bytes: the cost of a code does not depend on what it says."""
    dim, lead = _width(shape), (shape.batch, shape.heads, shape.length)
    return paris.ParisCodes(
        draw.integers(256, *lead, dim // 8, dtype=torch.uint8),
        draw.integers(256, *lead, 3 * dim // 8, dtype=torch.uint8),
        draw.normal(*lead, dim // _M, dtype=_WEIGHT).abs(),
    )


def _draw_queries(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.batch, shape.heads, 1, shape.group, _width(shape))


def _draw_candidates(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.ids(shape, _candidates(shape)).sort(dim=-1).values


PARIS_OPS = (
    # Keys to their codes, the mean key of each head subtracted, as a flush does. The rotation is
    # additions alone, so no multiply-adds count.
    KernelOp(
        name="paris.encode",
        # Keys [B, H, n, D], the means [B, H, D] and the P signs of the rotation in fp32.
        read=lambda s: s.vectors(s.tokens) + (s.all_heads * s.head_dim + _width(s)) * FP32_BYTES,
        written=lambda s: s.tokens * _code_bytes(s),
        inputs=_encode,
        # Coordinates at the border of two levels go to either, and weights are rounded to bf16.
        check=(_code_error, 1e-2),
        copies=8,
    ),
    # Points of all tokens by their sign patterns, for each query head of a group.
    KernelOp(
        name="paris.collisions",
        # A bit a coordinate, queries, how many tokens have each pattern of a subspace, the mask.
        read=lambda s: (
            s.tokens * _width(s) // 8
            + _query_bytes(s)
            + s.all_heads * _width(s) // _M * (1 << _M) * 4
            + s.mask_bytes
        ),
        # A byte a token and KV head, and a histogram of 256 counts for each KV head.
        written=lambda s: s.tokens + s.all_heads * _HISTOGRAM_BYTES,
        inputs=lambda s, draw: _collisions(s, draw, valid=draw.all_valid(s)),
        # Patterns at the border of two tiers go to either.
        check=(unequal, 1e-2),
        copies=16,
    ),
    # The tokens with the most points.
    KernelOp(
        name="paris.candidates",
        read=lambda s: s.tokens + s.all_heads * _HISTOGRAM_BYTES,
        written=lambda s: _all_candidates(s) * ID_BYTES,
        inputs=_best,
        check=(unequal, 0.0),
        sizes=_candidates_of,
        copies=32,
    ),
    # Estimated scores of the candidates, for each query head of a group.
    KernelOp(
        name="paris.rerank",
        # Ids and whole codes of the candidates, queries, 8 levels.
        read=lambda s: (
            _all_candidates(s) * (ID_BYTES + _code_bytes(s)) + _query_bytes(s) + 8 * FP32_BYTES
        ),
        written=lambda s: _all_candidates(s) * s.group * FP32_BYTES,
        products=lambda s: _all_candidates(s) * s.group * _width(s),
        inputs=_rerank,
        sizes=_candidates_of,
        # The codes of all tokens.
        stored=lambda s: s.tokens * _code_bytes(s),
    ),
    # The candidates that matter most to any query head of a group.
    KernelOp(
        name="relevance.best_ids",
        read=lambda s: _all_candidates(s) * (ID_BYTES + s.group * FP32_BYTES),
        written=lambda s: s.selected * ID_BYTES,
        inputs=_best_ids,
        # Of candidates that matter equally any may be taken.
        check=(not_shared, 1e-3),
        sizes=_candidates_of,
        copies=16,
    ),
)
