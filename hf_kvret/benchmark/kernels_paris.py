"""ParisKV's operations, as ``bench kernels`` measures them, with the defaults of its method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_kvret.benchmark.kernels_work import (
    Call,
    Draw,
    KernelOp,
    KernelShape,
    Work,
    distance,
    not_shared,
    unequal,
)
from hf_kvret.methods.paris import ParisConfig
from hf_kvret_kernels import paris, relevance

_FP32_BYTES = 4
_ID_BYTES = 4
_WEIGHT = torch.bfloat16
_HISTOGRAM_BYTES = 256 * 4
_CONFIG = ParisConfig()
_M = _CONFIG.subspace_dim
# Coordinates at the border of two levels go to either, and weights are rounded to bf16.
_CODE_ERROR = 1e-2
_SCORE_ERROR = 1e-3
# Patterns at the border of two tiers go to either.
_POINT_ERROR = 1e-2
# Of candidates that matter equally any may be taken.
_LEFT_OUT = 1e-3


class ParisEncode(KernelOp):
    """Keys to their codes, the mean key of each head subtracted, as a flush does."""

    name = "paris.encode"
    copies = 8

    def work(self, shape: KernelShape) -> Work:
        """Reads the keys ``[B, H, n, D]``, the means ``[B, H, D]`` and the P signs of the rotation
        in fp32; writes one bit of sign and three of magnitude a coordinate, and a bf16 weight a
        subspace. The rotation is additions alone, so no multiply-adds count."""
        tokens, dim = shape.all_heads * shape.length, paris.rotated_dim(shape.head_dim)
        shared = (shape.all_heads * shape.head_dim + dim) * _FP32_BYTES
        return Work(shape.vectors(tokens) + shared, tokens * _code_bytes(shape))

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        keys = _draw_keys(shape, draw)
        mean = draw.normal(shape.batch, shape.heads, shape.head_dim)
        signs, levels = _basis(shape, draw)

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            codes = paris.encode(
                keys, signs, levels, m=_M, mean=mean, weight_dtype=_WEIGHT, backend=backend
            )
            return codes.sign, codes.magnitude, codes.weight

        def error(found: Sequence[Any], want: Sequence[Any]) -> float:
            return max(unequal(found[:2], want[:2]), distance(found[2:], want[2:]))

        return Call(run, error, _CODE_ERROR)


class ParisCollisions(KernelOp):
    """Points of all tokens by their sign patterns, for each query head of a group."""

    name = "paris.collisions"
    copies = 16

    def work(self, shape: KernelShape) -> Work:
        """Reads a bit a coordinate of all tokens, the rotated queries ``[B, H, 1, G, P]`` in fp32,
        how many tokens have each pattern (4 bytes a subspace and pattern) and a byte of mask a
        token; writes a byte a token and KV head, and a histogram of 256 counts for each KV head."""
        tokens, dim = shape.all_heads * shape.length, paris.rotated_dim(shape.head_dim)
        queries = shape.batch * shape.query_heads * dim * _FP32_BYTES
        counts = shape.all_heads * dim // _M * (1 << _M) * 4
        return Work(
            tokens * dim // 8 + queries + counts + shape.batch * shape.length,
            tokens + shape.all_heads * _HISTOGRAM_BYTES,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        sign, queries = _draw_codes(shape, draw).sign, _draw_queries(shape, draw)
        counts, valid = paris.count_centroids(sign, m=_M), draw.all_valid(shape)
        _, rho = _CONFIG.ratios(shape.length)

        def run(backend: str) -> tuple[torch.Tensor, ...]:
            return paris.collisions(
                queries,
                counts,
                sign,
                rho=rho,
                tiers=_CONFIG.tiers,
                m=_M,
                valid=valid,
                backend=backend,
            )

        return Call(run, unequal, _POINT_ERROR)


class ParisCandidates(KernelOp):
    """The tokens with the most points."""

    name = "paris.candidates"
    copies = 32

    def work(self, shape: KernelShape) -> Work:
        """Reads the points ``[B, H, 1, n]`` of a byte and a histogram for each KV head; writes
        4-byte ids of the candidates."""
        return Work(
            shape.all_heads * (shape.length + _HISTOGRAM_BYTES),
            shape.all_heads * _candidates(shape) * _ID_BYTES,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        sign = _draw_codes(shape, draw).sign
        _, rho = _CONFIG.ratios(shape.length)
        points, histogram = paris.collisions(
            _draw_queries(shape, draw),
            paris.count_centroids(sign, m=_M),
            sign,
            rho=rho,
            tiers=_CONFIG.tiers,
            m=_M,
        )
        count = _candidates(shape)
        return Call(
            lambda backend: (paris.candidates(points, histogram, count, backend=backend),),
            unequal,
            0.0,
        )

    def sizes(self, shape: KernelShape) -> str:
        return f"{_candidates(shape):,} candidates"


class ParisRerank(ParisCandidates):
    """Estimated scores of the candidates, for each query head of a group."""

    name = "paris.rerank"
    copies = 4

    def work(self, shape: KernelShape) -> Work:
        """Reads ids and whole codes of the candidates, the rotated queries ``[B, H, 1, G, P]`` in
        fp32 and 8 levels; writes 4 bytes a candidate and query head. A multiply-add for each
        coordinate of a candidate and query head."""
        found, dim = shape.all_heads * _candidates(shape), paris.rotated_dim(shape.head_dim)
        queries = (shape.batch * shape.query_heads * dim + 8) * _FP32_BYTES
        return Work(
            found * (_ID_BYTES + _code_bytes(shape)) + queries,
            found * shape.group * _FP32_BYTES,
            found * shape.group * dim,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        codes, levels = _draw_codes(shape, draw), _basis(shape, draw)[1]
        queries = _draw_queries(shape, draw)
        lead = (shape.batch, shape.heads, 1)
        ids = draw.tokens(shape.length, lead, _candidates(shape)).sort(dim=-1).values
        return Call(
            lambda backend: (paris.rerank(queries, codes, ids, levels, m=_M, backend=backend),),
            distance,
            _SCORE_ERROR,
        )

    def held_bytes(self, shape: KernelShape) -> int:
        """The codes of all tokens lie there too."""
        codes = shape.all_heads * shape.length * _code_bytes(shape)
        return super().held_bytes(shape) + codes


class BestIds(ParisCandidates):
    """The candidates that matter most to any query head of a group."""

    name = "relevance.best_ids"
    copies = 16

    def work(self, shape: KernelShape) -> Work:
        """Reads ids of the candidates and 4 bytes a candidate and query head; writes 4-byte ids of
        those that are selected."""
        found = shape.all_heads * _candidates(shape)
        return Work(
            found * (_ID_BYTES + shape.group * _FP32_BYTES),
            shape.all_heads * shape.top_k * _ID_BYTES,
        )

    def prepare(self, shape: KernelShape, draw: Draw) -> Call:
        lead = (shape.batch, shape.heads, 1)
        scores = draw.normal(*lead, shape.group, _candidates(shape))
        ids = draw.tokens(shape.length, lead, _candidates(shape)).sort(dim=-1).values
        return Call(
            lambda backend: (relevance.best_ids(scores, ids, shape.top_k, backend=backend),),
            not_shared,
            _LEFT_OUT,
        )


def _code_bytes(shape: KernelShape) -> int:
    """Of a token and KV head: four bits a coordinate, a weight a subspace."""
    dim = paris.rotated_dim(shape.head_dim)
    return dim // 2 + dim // _M * _WEIGHT.itemsize


def _candidates(shape: KernelShape) -> int:
    """As many as the method takes of that many cold tokens."""
    beta, _ = _CONFIG.ratios(shape.length)
    return min(shape.length, max(shape.top_k, math.ceil(beta * shape.length)))


def _basis(shape: KernelShape, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    signs = paris.random_signs(paris.rotated_dim(shape.head_dim), _CONFIG.seed)
    return signs.to(draw.device), paris.magnitude_levels(_M).to(draw.device)


def _draw_keys(shape: KernelShape, draw: Draw) -> torch.Tensor:
    return draw.normal(shape.batch, shape.heads, shape.length, shape.head_dim, dtype=shape.dtype)


def _draw_codes(shape: KernelShape, draw: Draw) -> paris.ParisCodes:
    """Of random bytes: the cost of a code does not depend on what it says."""
    dim, lead = paris.rotated_dim(shape.head_dim), (shape.batch, shape.heads, shape.length)
    return paris.ParisCodes(
        draw.integers(256, *lead, dim // 8, dtype=torch.uint8),
        draw.integers(256, *lead, 3 * dim // 8, dtype=torch.uint8),
        draw.normal(*lead, dim // _M, dtype=_WEIGHT).abs(),
    )


def _draw_queries(shape: KernelShape, draw: Draw) -> torch.Tensor:
    dim = paris.rotated_dim(shape.head_dim)
    return draw.normal(shape.batch, shape.heads, 1, shape.group, dim)


PARIS_OPS: tuple[KernelOp, ...] = (
    ParisEncode(),
    ParisCollisions(),
    ParisCandidates(),
    ParisRerank(),
    BestIds(),
)
