"""LRQKIndex: low-rank proxies from the closed form, shared by the heads of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import CapturableIndex, ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import number, part, tensor
from hf_kvret.methods.lrqk.als import PaperLRQKIndex
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import (
    Factors,
    KeyGrams,
    Proxies,
    QueryGrams,
    closed_form,
    project,
)
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import Store
from hf_kvret_kernels import proxy
from hf_kvret_kernels.host_step import HostSearch, ProxySearch

# An error (share of the squared scores) too small to justify reading all keys again.
_NEGLIGIBLE = 1e-4
# Tensors that there are once tokens are cold.
_LATER: dict[str, Any] = {"optional": True, "shared": True, "dtype": torch.float32}


class LRQKIndex(CapturableIndex, Index):
    """A proxy of r numbers for every cold key; all of them are scored for every query.

    Gram matrices of queries and keys are accumulated. As soon as there are cold keys, the optimal
    factors are computed from these (``closed_form``); then the proxy of a key or a query is one
    product, with nothing to solve when decoding. When the error for the newest queries has grown
    since the factors were made, and new factors would be better, all keys are read from the store
    and projected again: at once for a question of several tokens, otherwise at a flush.
    """

    _keys: KeyGrams = part(KeyGrams, may_be_empty=True)
    _queries: QueryGrams = part()
    _proxies: Proxies = part(may_be_empty=True)
    # The maps of the factors, [B, F, D, r], and the mean key, [B, Hkv, D].
    _to_query: torch.Tensor | None = tensor(dims="B f D r", **_LATER)
    _to_key: torch.Tensor | None = tensor(dims="B f D r", **_LATER)
    _mean: torch.Tensor | None = tensor(dims="B H D", **_LATER)
    # The error for the newest queries at the last check, [B, F].
    _reference_error: torch.Tensor | None = tensor(
        key="expected", optional=True, shared=True, dims="B f", dtype=torch.float64
    )
    _partial: bool = number(False, key="due")
    _check: bool = number(False, key="due")
    _flushed: bool = number(False, key="due")
    # Queries since the last reprojection: drafts must not trigger one every time.
    _queries_since_projection: float = number(math.inf, key="due")
    _reprojections: int = number(0, saved=False, reset_on_fork=True)
    _reprojected_rows: int = number(0, saved=False, reset_on_fork=True)

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._queries = QueryGrams(0, options.half_life)
        self._proxies = Proxies()

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        if not self._queries.sets:
            self.options.rank_of(keys.shape[-1])
            self._queries.sets = keys.shape[1]
        # Where there are proxies, a search follows, whose kernel writes the query down.
        later = queries.is_cuda and self._to_query is not None and not self.options.lossless
        self._queries.add(queries, valid, later and self._proxies.rows.shape[2] > 0)
        self._check |= queries.shape[2] > 1
        self._queries_since_projection += queries.shape[2]

    def add(self, block: TokenBlock) -> None:
        # Used by ``build``: in a chunked prompt, the factors are made from the first chunk only.
        self._partial, self._flushed = self._to_query is not None, True
        self._keys.add(block.keys, block.valid)
        factors = self._factors
        if factors is None or self._mean is None:
            self._adopt(self._fit(), [block.keys])
            return
        for proxies in project(factors.to_key, [block.keys], self._mean):
            self._proxies.append(proxies)

    def build(self, cold: ColdTokens) -> None:
        # All of the prompt is in the factors, or will be now.
        self._flushed = False
        if self._partial:
            every_row = torch.ones_like(cold.valid[:, 0])
            self._reproject(self._fit(), cold.store, every_row)
            self._partial, self._queries_since_projection = False, math.inf
        self.before_search(cold)

    def before_search(self, cold: ColdTokens) -> None:
        """Project all keys again where that reduces the error, or keys have outgrown int8.

        Synchronizes with the device only after a flush or a pass of several tokens.
        """
        is_question = self._check and self._queries_since_projection >= 2 * self.options.half_life
        is_due, self._check, self._flushed = is_question or self._flushed, False, False
        old = self._factors
        if not is_due or old is None or self._mean is None or self._reference_error is None:
            return
        drift, error = self.options.drift, self._error(old)
        worse = error > drift * self._reference_error.clamp(min=_NEGLIGIBLE)
        outgrown = self._proxies.outgrown(self._keys.spread(old.to_key, self._mean))
        if bool((worse | outgrown).any()):
            factors = self._fit()
            gains = outgrown | worse & (error > drift * self._error(factors))
            # So that the next reprojection needs an even larger error.
            self._reference_error = torch.where(worse, error, self._reference_error)
            if bool(gains.any()):
                self._reproject(factors, cold.store, gains.any(dim=1))

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        return proxy.top_indices(
            query,
            self._proxies.rows,
            self._heads(),
            cold.budget,
            **cold.scoring._asdict(),
            projection=self._projection(cold),
            kept=self._queries.buffer.take_new(query),
        )

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch:
        proxies, offset = self._projection(cold).of(query.float() * cold.scale)
        return ProxySearch(proxies, self._proxies.rows, offset)

    def _projection(self, cold: ColdTokens) -> proxy.Projection:
        assert self._to_query is not None, "add comes first"
        # The cap applies to the whole score, including the part of the mean key.
        mean = None if cold.softcap is None else self._mean
        return proxy.Projection(self._to_query, self._proxies.steps, mean)

    def before_capture(self) -> None:
        self._queries.before_capture()
        self._before = self._check, self._flushed, self._queries_since_projection

    def capture_failed(self) -> None:
        self._check, self._flushed, self._queries_since_projection = self._before
        self._queries.capture_failed()

    def before_replay(self) -> None:
        self._queries_since_projection += 1
        self._queries.before_replay()

    def cost(self, n: int, budget: int) -> SearchCost:
        """No candidates: proxies alone decide."""
        if self._to_query is None:
            return SearchCost(0, 0)
        return SearchCost(0, self._proxies.rows.nbytes + self._to_query.nbytes)

    def crop(self, length: int) -> None:
        """As for every state; a crop to 0 also forgets the queries."""
        if length == 0:
            self.reset()
        super().crop(length)

    def stats(self) -> dict[str, Any]:
        """Statistics of the proxies; counts since the index was made or forked.

        ``proxy_error``: relative error of the scores for the newest queries (root of the share of
        squares), mean over heads. ``reprojections``: how often all keys were projected again, and
        ``reprojected_rows``: keys read from the store for that, over batch and KV heads.
        """
        error = None if self._factors is None else float(self._error(self._factors).sqrt().mean())
        return {
            "proxy_error": error,
            "reprojections": self._reprojections,
            "reprojected_rows": self._reprojected_rows,
        }

    @property
    def _factors(self) -> Factors | None:
        if self._to_query is None or self._to_key is None:
            return None
        return Factors(self._to_query, self._to_key)

    def _fit(self) -> Factors:
        """The optimal factors for all keys and queries so far."""
        assert self._queries.sets, "on_forward comes before add"
        queries = self._queries.weighted(self.options.recency)
        rank = self.options.rank_of(queries.shape[-1])
        return closed_form(queries, self._keys.matrix(), rank)

    def _error(self, factors: Factors) -> torch.Tensor:
        """``[B, F]`` fp64: relative squared error of the newest queries' scores."""
        return factors.error(self._queries.weighted(1.0), self._keys.matrix())

    def _reproject(self, factors: Factors, store: Store, rows: torch.Tensor) -> None:
        """Make new proxies of all keys for the sequences where ``rows [B]`` is True."""
        self._adopt(factors, (keys for _, keys in store.key_chunks()), rows)
        self._queries_since_projection = 0.0
        self._reprojections += 1
        self._reprojected_rows += len(store) * len(rows) * self._heads()

    def _adopt(
        self, factors: Factors, keys: Iterable[torch.Tensor], rows: torch.Tensor | None = None
    ) -> None:
        """Use ``factors`` from now on, with proxies of ``keys``, all cold keys.

        With ``rows [B]`` only where it is True: sequences must not affect each other.
        """
        tensors = [factors.to_query, factors.to_key, self._keys.mean(), self._error(factors)]
        keep = None
        if rows is not None:
            keep = ~rows
            old = [self._to_query, self._to_key, self._mean, self._reference_error]
            tensors = [
                torch.where(rows.view(-1, *[1] * (x.ndim - 1)), x, y)
                for x, y in zip(tensors, old, strict=True)
                if y is not None
            ]
        self._to_query, self._to_key, self._mean, self._reference_error = tensors
        in_bytes = self.options.in_bytes
        spread = self._keys.spread(self._to_key, self._mean) if in_bytes else None
        self._proxies.replace(project(self._to_key, keys, self._mean), spread, keep)

    def _heads(self) -> int:
        assert self._mean is not None
        return self._mean.shape[1]


class LRQKCache(RetrievalCache):
    """Scores of low-rank proxies choose the tokens (LRQK, sections 4.2 and 4.3).

    The published hit/miss buffer is ``store="resident"``, for this and every other method.
    """

    name: ClassVar[str] = "lrqk"
    Config: ClassVar[type[RetrievalConfig]] = LRQKConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> Index:
        """A new, empty index; the same for every layer."""
        return LRQKIndex(options) if options.factors == "closed" else PaperLRQKIndex(options)
