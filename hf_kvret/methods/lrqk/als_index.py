"""PaperLRQKIndex: LRQK as published, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.schema import Schema, check_ids, damaged
from hf_kvret.contracts.state import part, tensor
from hf_kvret.methods.lrqk.als import (
    RANDOM_START,
    STARTS,
    Bases,
    Moments,
    OmegaProducts,
    RandomSource,
)
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import alternating
from hf_kvret.methods.lrqk.proxies import Proxies
from hf_kvret.methods.lrqk.recent_proxies import RecentProxies
from hf_kvret.stores import Store
from hf_kvret_kernels import proxy
from hf_kvret_kernels.host_step import HostSearch, ProxySearch

_BASIS: dict[str, Any] = {
    **{"optional": True, "shared": True, "finite": True},
    **{"dims": "B Q R D", "dtype": torch.float32},
}


class PaperLRQKIndex(Index):
    """Algorithms 1 and 2: ALS factors for each query head, and solves at every step.

    Each query head selects for itself. A step solves for the proxies of its query and key, fitted
    to the keys that were on the device in the step before (the selected ones and the ``lite``
    newest), and updates B_Q and B_K. Proxies of tokens in the window are kept apart until they
    become cold.

    Departures: the factors come from Gram matrices, with the same result (see ``alternating``); a
    prompt is factorized when the first token after it is decoded, so that it may come in
    chunks; a pass of several tokens takes their steps one after the other; of a prompt's tokens
    that are in the window then, all but the newest ``max(lite, max_draft)`` get the proxies of
    algorithm 2's first guess, when they leave it.
    """

    capture_obstacle = "the published lrqk tracks the tokens of the window on the host"

    _queries: Moments = part(may_be_empty=True)
    _keys: Moments = part(may_be_empty=True)
    _chance: RandomSource = part(may_be_empty=True)
    _proxies: Proxies = part(may_be_empty=True)
    _recent: RecentProxies = part(key="waiting")
    # B_Q and B_K, [B, Hq, r, D].
    _query_basis: torch.Tensor | None = tensor(key="bases.query", **_BASIS)
    _key_basis: torch.Tensor | None = tensor(key="bases.key", **_BASIS)
    # Of the newest query, [B, Hq, 1, k] int32.
    _selection: torch.Tensor | None = tensor(
        key="selected.ids", optional=True, shared=True, dims="B Q 1 k", dtype=torch.int32
    )

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._chance = RandomSource(options.seed)
        is_random = options.init == RANDOM_START
        self._queries, self._keys = Moments(is_random), Moments(is_random)
        self._proxies = Proxies(options.proxy_dtype)
        self._recent = RecentProxies(self._room(options))
        self._forget_pass()

    def _forget_pass(self) -> None:
        """Drop state that lives between the hooks of one pass."""
        # Set by ``before_search`` for ``search``.
        self._omega: OmegaProducts | None = None
        self._valid: torch.Tensor | None = None

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        rank = self.options.rank_of(keys.shape[-1])
        self._valid = valid
        if valid is not None:
            # Padding becomes rows of zeros, which add nothing to the products below.
            queries, keys = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (queries, keys))
        if self._bases is None:
            group = queries.shape[1] // keys.shape[1]
            self._queries.add(queries, rank, self._chance)
            self._keys.add(keys.repeat_interleave(group, dim=1), rank, self._chance)
        self._recent.add(keys, start, self._bases)

    def build(self, cold: ColdTokens) -> None:
        options = self.options
        queries, keys = self._queries, self._keys
        if queries.gram is None or keys.gram is None:
            raise RuntimeError("no query was seen: call on_forward before build")
        rank = options.rank_of(queries.gram.shape[-1])
        starts = STARTS[options.init](queries, keys, rank)
        factors = alternating(queries.gram, keys.gram, *starts, options.iterations, options.penalty)
        self._query_basis, self._key_basis = factors.query_basis, factors.key_basis
        self._omega = None
        self._recent.start(factors.to_key)
        self._proxies.replace(_project(factors.to_key, cold.store))
        for state in (queries, keys, self._chance):
            state.reset()

    def add(self, block: TokenBlock) -> None:
        """After ``build``, add proxies of the block; those of the prompt are made by ``build``."""
        if self._bases is not None:
            self._proxies.append(self._recent.leave(block, self._bases))

    def before_search(self, cold: ColdTokens) -> None:
        """Read the keys selected in the step before, to which the next query is fitted."""
        if self._bases is None:
            self.build(cold)
            return
        self._omega = self._recent.omega(self.options.lite)
        if self._selection is not None:
            ids = self._selection
            keys, _ = cold.store.gather(ids)
            places = ids[:, :, 0].clamp(min=0).long().unsqueeze(-1)
            rows = self._proxies.rows
            proxies = rows.gather(2, places.expand(*places.shape[:3], rows.shape[-1]))
            proxies = self._proxies.values(proxies).masked_fill(ids[:, :, 0, :, None] < 0, 0.0)
            self._omega = self._omega.plus(OmegaProducts.of(keys[:, :, 0], proxies))

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        return proxy.top_indices(
            self._solve(query, cold),
            self._proxies.rows,
            query.shape[1],
            cold.budget,
            valid=cold.valid,
            softcap=cold.softcap,
        )

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch:
        return ProxySearch(self._solve(query, cold), self._proxies.rows, heads=query.shape[1])

    def after_search(self, ids: torch.Tensor) -> None:
        """Remember what the newest query has chosen."""
        self._selection = ids[:, :, -1:]

    def _solve(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """Scaled proxies ``[B, Hq, Q, r]`` fp32 of the queries; takes the steps of the bases."""
        if self._bases is None:
            raise RuntimeError("the index is empty: call on_forward, add and build first")
        options, count = self.options, query.shape[2]
        if self._valid is not None:
            # Padding must not change the bases.
            query = query.masked_fill(~self._valid[:, None, :, None], 0.0)
        keys = self._recent.newest(count, query.shape[1])
        of_queries, of_keys, bases = [], [], self._bases
        for number in range(count):
            pair = query[:, :, number].float(), keys[:, :, number]
            q_hat, k_hat, bases = bases.step(
                *pair, self._omega, options.iterations, options.penalty
            )
            of_queries.append(q_hat)
            of_keys.append(k_hat)
        self._query_basis, self._key_basis = bases.query, bases.key
        self._recent.replace_newest(torch.stack(of_keys, dim=2))
        return self._proxies.weigh(torch.stack(of_queries, dim=2)) * cold.scale

    def reset(self) -> None:
        super().reset()
        self._forget_pass()

    def fork(self) -> Self:
        """As for every state, without state between hooks, which is of the original."""
        twin = super().fork()
        twin._forget_pass()
        return twin

    def crop(self, length: int) -> None:
        """As for every state; drops the selection, which may contain cropped tokens."""
        if length == 0:
            self.reset()
        super().crop(length)
        self._selection = None

    def set_options(self, options: Any) -> None:
        super().set_options(options)
        self._recent.room = self._room(options)

    def cost(self, n: int, budget: int) -> SearchCost:
        """All proxies, the bases twice (read and written), and the keys of the query's fit."""
        bases = self._bases
        if bases is None:
            return SearchCost(0, 0)
        keys = self._recent.keys.rows
        fit_bytes = keys.nbytes + self._recent.proxies.rows.nbytes
        if self._selection is not None:
            fit_bytes += self._selection.numel() * keys.shape[-1] * keys.element_size()
        both = 2 * (bases.query.nbytes + bases.key.nbytes)
        return SearchCost(0, self._proxies.rows.nbytes + both + fit_bytes)

    def loaded(self) -> None:
        """KeyError for a missing part."""
        length = len(self._proxies)
        parts = {
            "bases.query": self._query_basis,
            "bases.key": self._key_basis,
            "proxies.rows": length or None,
            "waiting.proxies": self._recent.proxies.is_allocated or None,
        }
        absent = [name for name, value in parts.items() if value is None]
        if 0 < len(absent) < len(parts):
            raise KeyError(absent[0])
        if self._queries.cross is not None and not self._chance.is_drawn:
            raise KeyError("chance.state")

    def saved_sizes(self, schema: Schema) -> dict[str, int]:
        """Rank R; proxies are of each query head."""
        heads = schema.get("Q")
        return {"R": self.options.rank_of(schema["D"])} | ({} if heads is None else {"F": heads})

    def check_loaded(self, schema: Schema) -> None:
        """ValueError for selected ids out of range, or without what the factors are made of."""
        super().check_loaded(schema)
        if self._selection is not None:
            check_ids("index.selected.ids", self._selection, schema["N"])
        basis = self._query_basis if self._bases is not None else self._queries.gram
        if basis is None or (self._bases is None and self._keys.gram is None):
            raise KeyError("queries.gram")
        if basis.shape[1] % schema["H"]:
            raise damaged(f"index: {basis.shape[1]} query heads")
        if self._bases is None and schema["N"]:
            # A save builds the index.
            raise KeyError("bases.query")

    @property
    def _bases(self) -> Bases | None:
        if self._query_basis is None or self._key_basis is None:
            return None
        return Bases(self._query_basis, self._key_basis)

    @staticmethod
    def _room(options: LRQKConfig) -> int:
        """Number of recent tokens to keep: those of a step, or those it fits its query to."""
        return max(options.lite, options.max_draft)


def _project(to_key: torch.Tensor, store: Store) -> Iterator[torch.Tensor]:
    """Proxies ``[B, Hq, *, r]`` of all keys in the store."""
    batch, _, dim, rank = to_key.shape
    for _, keys in store.key_chunks():
        maps = to_key.view(batch, keys.shape[1], -1, dim, rank)
        yield (keys.float().unsqueeze(2) @ maps).flatten(1, 2)
