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
    SCORE_ERROR,
    SizedOp,
    Work,
    distance,
    not_shared,
    operation,
    unequal,
)
from hf_kvret.methods.paris import ParisConfig
from hf_kvret_kernels import paris, relevance

_WEIGHT = torch.bfloat16
_HISTOGRAM_BYTES = 256 * 4
_CONFIG = ParisConfig()
_M = _CONFIG.subspace_dim


def _code_error(found: Sequence[Any], want: Sequence[Any]) -> float:
    return max(unequal(found[:2], want[:2]), distance(found[2:], want[2:]))


# Coordinates at the border of two levels go to either, and weights are rounded to bf16.
@operation("paris.encode", _code_error, 1e-2, copies=8)
def _encode(shape: KernelShape) -> SizedOp:
    """Keys to their codes, the mean key of each head subtracted, as a flush does.

    Reads the keys ``[B, H, n, D]``, the means ``[B, H, D]`` and the P signs of the rotation in
    fp32; writes one bit of sign and three of magnitude a coordinate, and a bf16 weight a subspace.
    The rotation is additions alone, so no multiply-adds count.
    """
    shared = (shape.all_heads * shape.head_dim + _width(shape)) * FP32_BYTES
    work = Work(shape.vectors(shape.tokens) + shared, shape.tokens * _code_bytes(shape))

    def inputs(draw: Draw) -> Any:
        keys, (signs, levels) = draw.keys(shape), _basis(shape, draw)
        mean = draw.normal(shape.batch, shape.heads, shape.head_dim)

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            codes = paris.encode(
                keys, signs, levels, m=_M, mean=mean, weight_dtype=_WEIGHT, backend=backend
            )
            return codes.sign, codes.magnitude, codes.weight

        return run

    return SizedOp(work, inputs)


# Patterns at the border of two tiers go to either.
@operation("paris.collisions", unequal, 1e-2, copies=16)
def _collisions(shape: KernelShape) -> SizedOp:
    """Points of all tokens by their sign patterns, for each query head of a group.

    Reads a bit a coordinate of all tokens, the rotated queries ``[B, H, 1, G, P]`` in fp32, how
    many tokens have each pattern (4 bytes a subspace and pattern) and a byte of mask a token;
    writes a byte a token and KV head, and a histogram of 256 counts for each KV head.
    """
    dim = _width(shape)
    counts = shape.all_heads * dim // _M * (1 << _M) * 4
    read = shape.tokens * dim // 8 + shape.queries * dim * FP32_BYTES + counts + shape.mask_bytes
    work = Work(read, shape.tokens + shape.all_heads * _HISTOGRAM_BYTES)
    return SizedOp(work, lambda draw: _colliding(shape, draw, valid=draw.all_valid(shape)))


@operation("paris.candidates", unequal, 0.0, copies=32)
def _best(shape: KernelShape) -> SizedOp:
    """The tokens with the most points.

    Reads the points ``[B, H, 1, n]`` of a byte and a histogram for each KV head; writes 4-byte ids
    of the candidates.
    """
    count = _candidates(shape)
    read = shape.tokens + shape.all_heads * _HISTOGRAM_BYTES
    work = Work(read, shape.all_heads * count * ID_BYTES)

    def inputs(draw: Draw) -> Any:
        points, histogram = _colliding(shape, draw)()
        return partial(paris.candidates, points, histogram, count)

    return SizedOp(work, inputs, _candidates_of(shape))


@operation("paris.rerank", distance, SCORE_ERROR)
def _rerank(shape: KernelShape) -> SizedOp:
    """Estimated scores of the candidates, for each query head of a group.

    Reads ids and whole codes of the candidates, the rotated queries ``[B, H, 1, G, P]`` in fp32 and
    8 levels; writes 4 bytes a candidate and query head. A multiply-add for each coordinate of a
    candidate and query head.
    """
    found, dim = shape.all_heads * _candidates(shape), _width(shape)
    read = found * (ID_BYTES + _code_bytes(shape)) + (shape.queries * dim + 8) * FP32_BYTES
    scores = found * shape.group

    def inputs(draw: Draw) -> Any:
        codes, queries = _draw_codes(shape, draw), _draw_queries(shape, draw)
        ids, levels = _draw_candidates(shape, draw), _basis(shape, draw)[1]
        return partial(paris.rerank, queries, codes, ids, levels, m=_M)

    work = Work(read, scores * FP32_BYTES, scores * dim)
    # The codes of all tokens lie there too.
    stored = shape.tokens * _code_bytes(shape)
    return SizedOp(work, inputs, _candidates_of(shape), stored)


# Of candidates that matter equally any may be taken.
@operation("relevance.best_ids", not_shared, 1e-3, copies=16)
def _best_ids(shape: KernelShape) -> SizedOp:
    """The candidates that matter most to any query head of a group.

    Reads ids of the candidates and 4 bytes a candidate and query head; writes 4-byte ids of those
    that are selected.
    """
    count = _candidates(shape)
    read = shape.all_heads * count * (ID_BYTES + shape.group * FP32_BYTES)

    def inputs(draw: Draw) -> Any:
        scores = draw.normal(shape.batch, shape.heads, 1, shape.group, count)
        return partial(relevance.best_ids, scores, _draw_candidates(shape, draw), shape.top_k)

    return SizedOp(Work(read, shape.selected * ID_BYTES), inputs, _candidates_of(shape))


def _width(shape: KernelShape) -> int:
    """P, the head dim as it is rotated."""
    return paris.rotated_dim(shape.head_dim)


def _code_bytes(shape: KernelShape) -> int:
    """Of a token and KV head: four bits a coordinate, a weight a subspace."""
    return _width(shape) // 2 + _width(shape) // _M * _WEIGHT.itemsize


def _candidates(shape: KernelShape) -> int:
    """As many as the method takes of that many cold tokens."""
    beta, _ = _CONFIG.ratios(shape.length)
    return min(shape.length, max(shape.top_k, math.ceil(beta * shape.length)))


def _candidates_of(shape: KernelShape) -> str:
    return f"{_candidates(shape):,} candidates"


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(_width(shape), _CONFIG.seed)
    return signs.to(draw.device), paris.magnitude_levels(_M).to(draw.device)


def _colliding(shape: KernelShape, draw: Draw, **more: Any) -> Any:
    """A call of ``paris.collisions`` with inputs."""
    sign, queries = _draw_codes(shape, draw).sign, _draw_queries(shape, draw)
    counts = paris.count_centroids(sign, m=_M)
    given = {"rho": _CONFIG.ratios(shape.length)[1], "tiers": _CONFIG.tiers, "m": _M}
    return partial(paris.collisions, queries, counts, sign, **given, **more)


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


PARIS_OPS = (_encode, _collisions, _best, _rerank, _best_ids)
