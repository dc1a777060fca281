"""Ways to make low-rank proxies of queries and keys, side by side for a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from lrqk_layers import Approximation, LayerStudy

from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import Factors, alternating, closed_form
from hf_kvret.methods.lrqk.grams import KeyGrams, QueryGrams
from hf_kvret.methods.lrqk.proxies import Proxies
from hf_kvret.methods.lrqk.sketches import STARTS, Moments


class Variant(ABC):
    """A way to make proxies of rank r."""

    @abstractmethod
    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        """The scores by proxies of that rank, which is at most the head dim.

        ``options`` says what the variant leaves open: rounds, penalty, recency, half-life, seed.
        """


class Optimum(Variant):
    """The truncated SVD of each query head's Q K^T: no rank-r scores miss less (Eckart, Young)."""

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
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


class PerHead(Variant):
    """The closed form for each query head."""

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        return study.by_factors(closed_form(study.query_gram, study.key_gram, rank))


class PerHeadAtEqualBytes(PerHead):
    """The same with rank r / G, rounded down: all heads of a group take what a shared set takes."""

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        return super().approximate(study, max(1, rank // study.group), options)


@dataclass(frozen=True)
class Alternating(Variant):
    """The paper's algorithm 1 for each query head, from one of its three starts (B.6)."""

    start: str

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        start, chance = STARTS[self.start], torch.Generator().manual_seed(options.seed)
        of_queries, of_keys = Moments(start.random), Moments(start.random)
        of_queries.add(study.queries[None], rank, chance)
        of_keys.add(study.spread(study.keys)[None], rank, chance)
        starts = start.sketches(of_queries, of_keys, rank)
        grams = of_queries.sums["gram"], of_keys.sums["gram"]
        found = alternating(*grams, *starts, options.iterations, options.penalty)
        return study.by_factors(Factors(found.to_query[0], found.to_key[0]))


@dataclass(frozen=True)
class Shared(Variant):
    """The closed form for each KV head, from the Grams that an index adds up.

    Attributes:
        center: leave the mean key out.
        weighted: the newest queries weigh more, by ``recency``; else all alike.
        seen: the last queries, which select, and their keys are in the Grams.
    """

    center: bool = False
    weighted: bool = False
    seen: bool = True

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
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


@dataclass(frozen=True)
class Rounded(Variant):
    """Shared factors, with proxies of keys kept in few bits.

    ``dtype`` is ``"bfloat16"`` or ``"int8"``, as ``LRQKConfig.proxy_dtype``.
    """

    dtype: str
    shared: Shared = Shared()

    def approximate(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Approximation:
        factors = self.shared.fit(study, rank, options)
        mean = study.mean_key(self.shared.center)
        kept = Proxies(self.dtype)
        kept.replace([study.project(factors, mean)[None]])
        return study.by_rows(factors, kept.values(kept.rows)[0], mean)


ALTERNATING: Mapping[str, Variant] = MappingProxyType(
    {f"als {start}": Alternating(start) for start in STARTS}
)
PER_HEAD = "closed per head"
OPTIMUM = "optimum"
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        OPTIMUM: Optimum(),
        PER_HEAD: PerHead(),
        **ALTERNATING,
        f"{PER_HEAD} r/G": PerHeadAtEqualBytes(),
        "shared": Shared(),
        "shared bf16": Rounded("bfloat16"),
        "shared int8": Rounded("int8"),
        "shared centered": Shared(center=True),
        "shared weighted": Shared(weighted=True),
        "shared centered weighted": Shared(center=True, weighted=True),
        "shared unseen": Shared(seen=False),
        "shared weighted unseen": Shared(weighted=True, seen=False),
    }
)
