"""PaperLRQKIndex: LRQK as published, for comparison."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import State, number, part, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.methods.lrqk.als import Bases, Moments, RandomSource, Sketch, alternating
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.proxies import Proxies, project
from hf_kvret_kernels import proxy
from hf_kvret_kernels.host_step import HostSearch, ProxySearch

_small = partial(TokenBuffer, 64)
_BASIS: dict[str, Any] = {
    "optional": True,
    "shared": True,
    "dims": "B Q r D",
    "dtype": torch.float32,
}


class RecentProxies(State):
    """The tokens that are not cold; before the factors are made only the last ``room``.

    Attributes:
        keys: ``[B, Hkv, m, D]``, of slots ``end - m .. end``; rows of zeros for padding.
        proxies: ``[B, Hq, m, r]`` fp32; empty before ``start``.
        end: slot after the newest.
    """

    keys: TokenBuffer = passed(_small, dims="B H m D")
    proxies: TokenBuffer = passed(_small, may_be_empty=True, dims="B Q m r", dtype=torch.float32)
    end: int = number(0)
    _pass_len: int = number(0, key="end")

    def __init__(self, room: int) -> None:
        self.room = room

    def add(self, keys: torch.Tensor, start: int, bases: Bases | None) -> None:
        """Put ``keys [B, Hkv, q, D]`` at slot ``start``, in place of all from there on."""
        self.end, self._pass_len = start + keys.shape[2], keys.shape[2]
        if bases is None:
            first = max(start, self.end - self.room)
            self.keys.put(keys[:, :, first - start :], first)
            self.keys.drop(self.end - self.room)
            return
        self.keys.put(keys, start)
        self.proxies.put(bases.guess(keys), start)

    def start(self, to_key: torch.Tensor) -> None:
        """Make the proxies of all tokens with ``to_key [B, Hq, D, r]``."""
        keys = _repeat(self.keys.rows.float(), to_key.shape[1])
        self.proxies.put(keys @ to_key, self.keys.first)

    def newest(self, count: int, query_heads: int) -> torch.Tensor:
        """Keys ``[B, Hq, count, D]`` fp32 of the newest tokens."""
        return _repeat(self.keys.since(self.end - count).float(), query_heads)

    def replace_newest(self, proxies: torch.Tensor) -> None:
        """Replace the proxies of the newest tokens by ``[B, Hq, count, r]``."""
        self.proxies.put(proxies, self.end - proxies.shape[2])

    def omega(self, count: int) -> Sketch:
        """The sketch of the ``count`` newest tokens before the last pass."""
        keys, proxies = self.keys.rows, self.proxies.rows
        last = keys.shape[2] - min(self._pass_len, keys.shape[2])
        newest = slice(max(0, last - count), last)
        return Sketch.of_rows(proxies[:, :, newest], _repeat(keys[:, :, newest], proxies.shape[1]))

    def leave(self, block: TokenBlock, bases: Bases) -> torch.Tensor:
        """Remove a block that became cold; returns its proxies ``[B, Hq, n, r]``.

        Tokens dropped before the factors were made get a guess (``Bases.guess``).
        """
        first = self.proxies.first
        unknown = min(max(0, first - block.start), len(block))
        guesses = bases.guess(block.keys[:, :, :unknown])
        span = slice(max(0, block.start - first), max(0, block.end - first))
        proxies = torch.cat([guesses, self.proxies.rows[:, :, span]], dim=2)
        self.keys.drop(block.end)
        self.proxies.drop(block.end)
        return proxies

    def loaded(self) -> None:
        for rows in (self.keys, self.proxies):
            rows.first = self.end - len(rows)


def _repeat(keys: torch.Tensor, query_heads: int) -> torch.Tensor:
    """``keys [B, Hkv, n, D]`` for each query head, ``[B, Hq, n, D]``."""
    return keys.repeat_interleave(query_heads // keys.shape[1], dim=1)


class PaperLRQKIndex(Index):
    """Algorithms 1 and 2: ALS factors for each query head, and solves at every step.

    Each query head selects for itself. A step solves for the proxies of its query and key, fitted
    to the keys that were on the device in the step before (the selected ones and the
    ``fit_recent`` newest), and updates B_Q and B_K. Proxies of tokens in the window are kept apart
    until they become cold.

    Departures: the factors come from Gram matrices, with the same result (see ``alternating``); a
    prompt is factorized when the first token after it is decoded, so that it may come in
    chunks; a pass of several tokens takes their steps one after the other; of a prompt's tokens
    that are in the window then, all but the newest ``max(fit_recent, max_draft)`` get the
    proxies of algorithm 2's first guess, when they leave it.
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
    # The tokens that the newest query selected, [B, Hq, 1, k] int32.
    _selection: torch.Tensor | None = tensor(
        key="selected.ids", optional=True, shared=True, dims="B Q 1 k", dtype=torch.int32
    )

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._chance = RandomSource(options.seed)
        self._queries, self._keys = Moments(), Moments()
        self._proxies = Proxies(options.proxy_dtype)
        self._recent = RecentProxies(self._room(options))
        self._forget_pass()

    def _forget_pass(self) -> None:
        """Drop state that lives between the hooks of one pass."""
        # Set by ``before_search`` for ``search``.
        self._omega: Sketch | None = None
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
        starts = queries.start(), keys.start()
        limits = options.iterations, options.penalty
        factors = alternating(queries.gram, keys.gram, *starts, *limits)
        self._query_basis, self._key_basis = factors.query_basis, factors.key_basis
        self._omega = None
        self._recent.start(factors.to_key)
        self._proxies.replace(
            project(factors.to_key, (keys for _, keys in cold.store.key_chunks()))
        )
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
        self._omega = self._recent.omega(self.options.fit_recent)
        if self._selection is not None:
            ids = self._selection
            keys, _ = cold.store.gather(ids)
            indices = ids[:, :, 0].clamp(min=0).long().unsqueeze(-1)
            rows = self._proxies.rows
            proxies = rows.gather(2, indices.expand(*indices.shape[:3], rows.shape[-1]))
            proxies = self._proxies.values(proxies).masked_fill(ids[:, :, 0, :, None] < 0, 0.0)
            self._omega = self._omega.plus(Sketch.of_rows(proxies, keys[:, :, 0]))

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
        """Remember the selection of the newest query."""
        self._selection = ids[:, :, -1:]

    def _solve(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """Scaled proxies ``[B, Hq, Q, r]`` fp32 of the queries; takes the steps of the bases."""
        if self._bases is None:
            raise RuntimeError("the index is empty: call on_forward, add and build first")
        options = self.options
        if self._valid is not None:
            # Padding must not change the bases.
            query = query.masked_fill(~self._valid[:, None, :, None], 0.0)
        keys = self._recent.newest(query.shape[2], query.shape[1])
        query_proxies, key_proxies, bases = [], [], self._bases
        for q, k in zip(query.unbind(2), keys.unbind(2), strict=True):
            limits = options.iterations, options.penalty
            q_hat, k_hat, bases = bases.step(q.float(), k, self._omega, *limits)
            query_proxies.append(q_hat)
            key_proxies.append(k_hat)
        self._query_basis, self._key_basis = bases.query, bases.key
        self._recent.replace_newest(torch.stack(key_proxies, dim=2))
        return self._proxies.weigh(torch.stack(query_proxies, dim=2)) * cold.scale

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

    @property
    def _bases(self) -> Bases | None:
        if self._query_basis is None or self._key_basis is None:
            return None
        return Bases(self._query_basis, self._key_basis)

    @staticmethod
    def _room(options: LRQKConfig) -> int:
        """Number of recent tokens to keep: those of a step, or those it fits its query to."""
        return max(options.fit_recent, options.max_draft)
