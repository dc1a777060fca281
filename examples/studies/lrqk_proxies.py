"""LRQK's factors on the queries and keys of a real layer: what they miss, what they select.

What stands for the scores is judged against the exact ones. Dimensions: Hq query heads, Hkv KV
heads, F sets of factors (one of both), l tokens, N queries that select, D head dim, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch

from hf_kvret.core.recall import exact_scores
from hf_kvret.evaluation.recording import RecordedLayer
from hf_kvret.methods.lrqk.als_init import STARTS, Moments, RandomSource
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import Factors, alternating, closed_form
from hf_kvret.methods.lrqk.grams import KeyGrams, QueryGrams
from hf_kvret.methods.lrqk.proxies import Proxies
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True, eq=False)
class Approximation:
    """What stands for the scores.

    Attributes:
        dots: ``[Hq, N, l]`` fp32, for inner products of the last queries and all keys.
        error, centered_error: ``[Hq]`` fp64 shares of the squared scores of all queries and keys
            that are missed; the second after each query's mean score was taken away.
        numbers: that proxies keep for a token and KV head.
    """

    dots: torch.Tensor
    error: torch.Tensor
    centered_error: torch.Tensor
    numbers: int


@dataclass(frozen=True, eq=False)
class LayerStudy(RecordedLayer):
    """A recorded layer whose last ``last`` queries select, each among the tokens before it."""

    last: int

    @property
    def dim(self) -> int:
        """D."""
        return self.keys.shape[-1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def asking(self) -> torch.Tensor:
        """The last queries, ``[Hq, N, D]``."""
        return self.queries[:, -self.last :]

    @cached_property
    def query_gram(self) -> torch.Tensor:
        """``[Hq, D, D]`` fp64, of all queries alike."""
        return gram(self.queries)

    @cached_property
    def key_gram(self) -> torch.Tensor:
        """``[Hq, D, D]`` fp64, of each query head's keys."""
        return self.spread(gram(self.keys))

    @cached_property
    def centered_key_gram(self) -> torch.Tensor:
        """The same, of the keys less their mean."""
        keys = self.keys.double()
        return self.spread(gram(keys - keys.mean(1, keepdim=True)))

    @cached_property
    def decomposition(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """SVD of Q K^T, fp64, by way of QR: of the scores themselves, no Gram is squared.

        The last rows of Q's basis ``[Hq, N, D]``, what makes Q of the basis ``[Hq, D, D]``, the
        left singular vectors in the basis ``[Hq, D, *]``, and the singular values ``[Hq, *]``.
        """
        basis, triangle = torch.linalg.qr(self.queries.double())
        other = self.spread(torch.linalg.qr(self.keys.double(), mode="r").R)
        left, singular, _ = torch.linalg.svd(triangle @ other.mT, full_matrices=False)
        return basis[:, -self.last :].clone(), triangle, left, singular

    def spread(self, parts: torch.Tensor) -> torch.Tensor:
        """``[Hq, ...]``: what each query head has of ``parts [F, ...]``."""
        return parts.repeat_interleave(self.queries.shape[0] // parts.shape[0], dim=0)

    def judge(self, found: Approximation, top_k: int) -> dict[str, Any]:
        """How good an approximation is, as plain JSON values.

        ``errors`` of each query head are relative Frobenius errors of the scores of all queries
        with all keys, ``sqrt(|S - S'|^2 / |S|^2)``; ``centered_errors`` the same after each query's
        mean score was taken from S and S', which the softmax doesn't see; ``error`` and
        ``centered_error`` their means. Of the last queries ``recall``, the share of the exact top-k
        that was selected, and ``mass`` and ``best_mass``, the share of the attention mass on the
        selected tokens and on the exact top-k: means over heads and queries. ``numbers`` as in
        ``Approximation``.
        """
        heads = self.keys.shape[0]
        exact_dots = exact_scores(self.asking[None], self.keys[None], 1.0)[0]
        exact, likely = self._logits(exact_dots), self._logits(found.dots)
        best = group_relevance(exact[None], heads)[0].topk(top_k, dim=-1).indices
        chosen = group_relevance(likely[None], heads)[0].topk(top_k, dim=-1).indices
        marks = torch.zeros(
            *chosen.shape[:2], exact.shape[-1], dtype=torch.bool, device=best.device
        )
        marks.scatter_(-1, chosen, True)
        shares = exact.softmax(dim=-1)
        errors, centered = (x.sqrt().tolist() for x in (found.error, found.centered_error))
        return {
            "error": fmean(errors),
            "centered_error": fmean(centered),
            "recall": float(marks.gather(-1, best).float().mean()),
            "mass": float(shares.gather(-1, self.spread(chosen)).sum(-1).mean()),
            "best_mass": float(shares.gather(-1, self.spread(best)).sum(-1).mean()),
            "numbers": found.numbers,
            "errors": errors,
            "centered_errors": centered,
        }

    def _logits(self, dots: torch.Tensor) -> torch.Tensor:
        """Scaled, capped, and -inf from a query's own token on, ``[Hq, N, l]`` fp32."""
        scores = soft_cap_(dots * self.scale, self.softcap)
        places = torch.arange(dots.shape[-1], device=dots.device)
        return scores.masked_fill(places >= places[-self.last :, None], float("-inf"))

    def by_factors(self, factors: Factors, center: bool = False) -> Approximation:
        """With maps ``[F, D, r]`` and proxies kept as they are, fp32."""
        mapped = Factors(self.spread(factors.to_query), self.spread(factors.to_key))
        centered = mapped.error(self.query_gram, self.centered_key_gram)
        if center:
            # The mean key's part of a score is exact: only the rest can be missed.
            error = centered * (self.query_gram * self.centered_key_gram).sum((-2, -1))
            error = error / (self.query_gram * self.key_gram).sum((-2, -1))
        else:
            error = mapped.error(self.query_gram, self.key_gram)
        mean = self.mean_key(center)
        return self._approximation(factors, self.project(factors, mean), mean, error, centered)

    def by_rows(self, factors: Factors, rows: torch.Tensor, mean: torch.Tensor) -> Approximation:
        """With any ``rows [F, l, r]`` for proxies of the keys less ``mean``, rounded ones too.

        What they miss of the scores is ``Q R^T`` with ``R = K - mean - rows to_query^T``.
        """
        keys = (self.keys.double() - mean).repeat_interleave(len(rows) // len(self.keys), dim=0)
        left = keys - rows.double() @ factors.to_query.double().mT
        whole = (self.query_gram * self.key_gram).sum((-2, -1))
        centered_whole = (self.query_gram * self.centered_key_gram).sum((-2, -1))
        error = (self.query_gram * self.spread(gram(left))).sum((-2, -1)) / whole
        left = left - left.mean(1, keepdim=True)
        centered = (self.query_gram * self.spread(gram(left))).sum((-2, -1)) / centered_whole
        return self._approximation(factors, rows, mean, error, centered)

    def mean_key(self, center: bool) -> torch.Tensor:
        """``[Hkv, 1, D]`` fp32, of the whole text; 0 without ``center``."""
        mean = self.keys.mean(1, keepdim=True)
        return mean if center else torch.zeros_like(mean)

    def project(self, factors: Factors, mean: torch.Tensor) -> torch.Tensor:
        """Proxies ``[F, l, r]`` fp32 of the keys less ``mean [Hkv, 1, D]``."""
        sets = len(factors.to_key) // len(self.keys)
        return (self.keys - mean).repeat_interleave(sets, dim=0) @ factors.to_key

    def _approximation(
        self,
        factors: Factors,
        rows: torch.Tensor,
        mean: torch.Tensor,
        error: torch.Tensor,
        centered: torch.Tensor,
    ) -> Approximation:
        asking = self.asking @ self.spread(factors.to_query)
        dots = asking @ self.spread(rows).mT
        # The part that centered proxies leave out: the same for all tokens, but a cap bends it.
        dots = dots + self.asking @ self.spread(mean).mT
        numbers = rows.shape[0] // self.keys.shape[0] * rows.shape[-1]
        return Approximation(dots, error.clamp(min=0.0), centered.clamp(min=0.0), numbers)


def gram(rows: torch.Tensor) -> torch.Tensor:
    """``X^T X`` in fp64 of ``rows [..., l, D]``."""
    rows = rows.double()
    return rows.mT @ rows


Variant = Callable[[LayerStudy, int, LRQKConfig], Approximation]
"""A way to make proxies: the scores by those of a rank, which is at most the head dim.

The options say what the variant leaves open: rounds, penalty, recency, half-life, seed.
"""


def _optimum(study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
    """The truncated SVD of each query head's Q K^T: no rank-r scores miss less (Eckart, Young)."""
    basis, triangle, left, singular = study.decomposition
    kept = left[..., :rank] @ (left[..., :rank].mT @ triangle)
    dots = (basis @ kept) @ study.spread(study.keys).double().mT
    squares = singular.square()
    whole = squares.sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    missed = triangle - kept
    centered = [
        ((part @ study.centered_key_gram) * part).sum((-2, -1)) for part in (missed, triangle)
    ]
    return Approximation(
        dots.float(),
        squares[..., rank:].sum(-1) / whole,
        centered[0].clamp(min=0.0) / centered[1].clamp(min=torch.finfo(torch.float64).tiny),
        study.group * rank,
    )


def _per_head(study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
    """The closed form for each query head."""
    return study.by_factors(closed_form(study.query_gram, study.key_gram, rank))


def _per_head_at_equal_bytes(study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
    """The same with rank r / G, rounded down: all heads of a group take what a shared set takes."""
    return _per_head(study, max(1, rank // study.group), options)


def _alternating(study: LayerStudy, rank: int, options: LRQKConfig, *, start: str) -> Approximation:
    """The paper's algorithm 1 for each query head, from one of its three starts (B.6)."""
    drawn, chance = STARTS[start], RandomSource(options.seed)
    of_queries, of_keys = Moments(drawn.random), Moments(drawn.random)
    of_queries.add(study.queries[None], rank, chance)
    of_keys.add(study.spread(study.keys)[None], rank, chance)
    starts = drawn.sketches(of_queries, of_keys, rank)
    assert of_queries.gram is not None and of_keys.gram is not None
    grams = of_queries.gram, of_keys.gram
    found = alternating(*grams, *starts, options.iterations, options.penalty)
    return study.by_factors(Factors(found.to_query[0], found.to_key[0]))


@dataclass(frozen=True)
class Shared:
    """The closed form for each KV head, from the Grams that an index adds up.

    Attributes:
        center: leave the mean key out.
        weighted: the newest queries weigh more, by ``recency``; else all alike.
        seen: the last queries, which select, and their keys are in the Grams.
    """

    center: bool = False
    weighted: bool = False
    seen: bool = True

    def __call__(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        return study.by_factors(self.fit(study, rank, options), self.center)

    def fit(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Factors:
        """Maps ``[Hkv, D, r]``."""
        end = study.keys.shape[1] - (0 if self.seen else study.last)
        of_queries = QueryGrams(study.keys.shape[0], options.half_life)
        of_queries.add(study.queries[None, :, :end], None)
        of_keys = KeyGrams()
        of_keys.add(study.keys[None, :, :end], None)
        queries = of_queries.weighted(options.recency if self.weighted else 0.0)
        factors = closed_form(queries, of_keys.matrix(self.center), rank)
        return Factors(factors.to_query[0], factors.to_key[0])


def _rounded(study: LayerStudy, rank: int, options: LRQKConfig, *, dtype: str) -> Approximation:
    """Shared factors, with proxies of keys kept in a ``LRQKConfig.proxy_dtype``."""
    shared = Shared()
    factors, mean = shared.fit(study, rank, options), study.mean_key(shared.center)
    kept = Proxies(dtype)
    kept.replace([study.project(factors, mean)[None]])
    return study.by_rows(factors, kept.values(kept.rows)[0], mean)


ALTERNATING: Mapping[str, Variant] = {
    f"als {start}": partial(_alternating, start=start) for start in STARTS
}
PER_HEAD = "closed per head"
OPTIMUM = "optimum"
VARIANTS: Mapping[str, Variant] = {
    OPTIMUM: _optimum,
    PER_HEAD: _per_head,
    **ALTERNATING,
    f"{PER_HEAD} r/G": _per_head_at_equal_bytes,
    "shared": Shared(),
    "shared bf16": partial(_rounded, dtype="bfloat16"),
    "shared int8": partial(_rounded, dtype="int8"),
    "shared centered": Shared(center=True),
    "shared weighted": Shared(weighted=True),
    "shared centered weighted": Shared(center=True, weighted=True),
    "shared unseen": Shared(seen=False),
    "shared weighted unseen": Shared(weighted=True, seen=False),
}
