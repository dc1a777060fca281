"""LRQKIndex: low-rank proxies from the closed form, shared by the heads of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.index import ColdTokens, Index
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.factors import Factors, closed_form
from hf_kvret.methods.lrqk.grams import PIECE, KeyGrams, QueryGrams
from hf_kvret.methods.lrqk.proxies import Proxies
from hf_kvret.stores import Store
from hf_kvret_kernels import proxy
from hf_kvret_kernels.top_k import top_k

# A share of the squared scores that is not worth a second reading of the keys.
_NEGLIGIBLE = 1e-4
_FITTED = ("to_query", "to_key", "mean", "expected")


class LRQKIndex(Index):
    """A proxy of r numbers for every cold key; all of them are scored for every query.

    Queries and keys are seen as Gram matrices while they pass. As soon as there are cold keys,
    the best factors there are come from these (``closed_form``); the proxy of a key or a query is
    one product then, with nothing to solve when decoding. When the newest queries are served
    worse than they were when the factors were made, and new factors would serve them better, all
    keys are read from the store and projected anew: at once for a question of several tokens,
    otherwise at a flush.
    """

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._keys = KeyGrams()
        self._queries: QueryGrams | None = None
        self._proxies = Proxies(options.proxy_dtype)
        self._factors: Factors | None = None
        self._mean: torch.Tensor | None = None
        # The error for the newest queries when it was last looked at, [B, F].
        self._expected: torch.Tensor | None = None
        self._partial = self._check = self._flushed = False
        # Queries since the keys were projected anew: drafts must not call for it every time.
        self._since = math.inf
        self._reprojections = self._reprojected_rows = 0
        self._before = self._check, self._flushed, self._since

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        if self._queries is None:
            self.options.rank_of(keys.shape[-1])
            sets = keys.shape[1] if self.options.shared else queries.shape[1]
            self._queries = QueryGrams(sets, self.options.half_life)
        self._queries.add(queries, valid)
        self._check |= queries.shape[2] > 1
        self._since += queries.shape[2]

    def observe(self, block: TokenBlock) -> None:
        # Of a prompt that comes in pieces, the factors know the first only.
        self._partial = self._factors is not None
        self._take(block)

    def build(self, cold: ColdTokens) -> None:
        if self._partial:
            rows = torch.ones(len(self._proxies.rows), dtype=torch.bool)
            self._reproject(self._fit(), cold.store, rows.to(self._proxies.rows.device))
            self._partial, self._since = False, math.inf
        self.refresh(cold)

    def extend(self, block: TokenBlock) -> None:
        self._take(block)
        self._flushed = True

    def refresh(self, cold: ColdTokens) -> None:
        """Project all keys anew where it is due and worth it.

        Looks at the error on the host only after a flush or a pass of several tokens.
        """
        asked = self._check and self._since >= 2 * self.options.half_life
        due, self._check, self._flushed = asked or self._flushed, False, False
        if not due or self._factors is None or self._expected is None:
            return
        drift, error = self.options.drift, self._error(self._factors)
        worse = error > drift * self._expected.clamp(min=_NEGLIGIBLE)
        if bool(worse.any()):
            factors = self._fit()
            gains = worse & (error > drift * self._error(factors))
            # Not to be asked about again before they are worse still.
            self._expected = torch.where(worse, error, self._expected)
            if bool(gains.any()):
                self._reproject(factors, cold.store, gains.any(dim=1))

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self._factors is None or self._mean is None:
            raise RuntimeError("the index is empty: watch and observe a block first")
        batch, query_heads, count, dim = query.shape
        sets = self._factors.to_query.shape[1]
        grouped = query.float().reshape(batch, sets, -1, dim) * scale
        proxies = self._proxies.weigh(grouped @ self._factors.to_query)
        offset = None
        if softcap is not None:
            # A cap bends the whole score, the mean key's part included.
            offset = (query.float() * self._mean_of(query_heads).unsqueeze(2)).sum(-1) * scale
        relevance = proxy.relevance(
            proxies.view(batch, query_heads, count, -1),
            self._proxies.rows,
            self._mean.shape[1],
            valid=valid,
            offset=offset,
            softcap=softcap,
        )
        return top_k(relevance, budget)

    def uncapturable(self) -> str | None:
        return None

    def settle(self) -> None:
        if self._queries is not None:
            self._queries.settle()
        self._before = self._check, self._flushed, self._since

    def broke_off(self) -> None:
        self._check, self._flushed, self._since = self._before
        if self._queries is not None:
            self._queries.broke_off()

    def replayed(self) -> None:
        self._since += 1
        if self._queries is not None:
            self._queries.replayed()

    def candidates(self, cold_len: int, budget: int) -> int:
        """0: proxies alone choose."""
        return 0

    def reorder(self, rows: torch.Tensor) -> None:
        self._keys.reorder(rows)
        self._proxies.reorder(rows)
        if self._queries is not None:
            self._queries.reorder(rows)
        self._set_fitted(
            {name: part.index_select(0, rows) for name, part in self._fitted().items()}
        )

    def crop(self, cold_len: int) -> None:
        if cold_len == 0:
            vars(self).update(vars(type(self)(self.options)))
        self._proxies.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.options)
        twin._keys, twin._proxies = self._keys.fork(), self._proxies.fork()
        twin._queries = None if self._queries is None else self._queries.fork()
        twin._set_fitted(self._fitted())
        twin._partial, twin._check, twin._since = self._partial, self._check, self._since
        twin._flushed = self._flushed
        return twin

    def nbytes(self) -> int:
        parts = [self._keys.nbytes(), self._proxies.nbytes()]
        parts += [] if self._queries is None else [self._queries.nbytes()]
        return sum(parts) + sum(part.nbytes for part in self._fitted().values())

    def select_nbytes(self) -> int:
        if self._factors is None:
            return 0
        return self._proxies.rows.nbytes + self._factors.to_query.nbytes

    def stats(self) -> dict[str, Any]:
        """What became of the proxies since the index was made or forked.

        ``proxy_error``: root of the share of the squared scores that they miss for the newest
        queries, mean over heads. ``reprojections``: how often all keys were projected anew, and
        ``reprojected_rows``: keys read from the store for it, over batch and KV heads.
        """
        error = None if self._factors is None else float(self._error(self._factors).sqrt().mean())
        return {
            "proxy_error": error,
            "reprojections": self._reprojections,
            "reprojected_rows": self._reprojected_rows,
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        parts = {"keys": self._keys.state_dict(), "proxies": self._proxies.state_dict()}
        if self._queries is None:
            return {}
        parts["queries"] = self._queries.state_dict()
        state = {f"{part}.{name}": x for part, found in parts.items() for name, x in found.items()}
        due = [self._partial, self._check, self._flushed, self._since]
        flags = torch.tensor(due, dtype=torch.float64)
        return state | {name: x.contiguous() for name, x in self._fitted().items()} | {"due": flags}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {
                name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
            }

        sets = state["queries.steady"].shape[1]
        self._queries = QueryGrams(sets, self.options.half_life)
        self._queries.load_state_dict(part("queries."))
        if any(name != "due" and not name.startswith("queries.") for name in state):
            self._keys.load_state_dict(part("keys."))
            self._proxies.load_state_dict(part("proxies."))
            self._set_fitted({name: state[name] for name in _FITTED})
        *flags, self._since = state["due"].tolist()
        self._partial, self._check, self._flushed = map(bool, flags)

    def _take(self, block: TokenBlock) -> None:
        self._keys.add(block.keys, block.valid)
        if self._factors is None or self._mean is None:
            self._adopt(self._fit(), [block.keys])
            return
        for proxies in self._project(self._factors, self._mean, [block.keys]):
            self._proxies.append(proxies)

    def _fit(self) -> Factors:
        """The best factors for the keys and queries seen."""
        if self._queries is None:
            raise RuntimeError("no query was seen: call watch before observe")
        queries = self._queries.weighted(self.options.recency)
        rank = self.options.rank_of(queries.shape[-1])
        return closed_form(queries, self._key_gram(queries.shape[1]), rank)

    def _error(self, factors: Factors) -> torch.Tensor:
        """``[B, F]`` fp64: share of the squared scores of the newest queries that is missed."""
        assert self._queries is not None
        newest = self._queries.weighted(1.0)
        return factors.error(newest, self._key_gram(newest.shape[1]))

    def _key_gram(self, sets: int) -> torch.Tensor:
        gram = self._keys.matrix(self.options.center)
        return gram.repeat_interleave(sets // gram.shape[1], dim=1)

    def _reproject(self, factors: Factors, store: Store, rows: torch.Tensor) -> None:
        """Make new proxies of all keys for the batch rows where ``rows [B]`` is True.

        The others keep theirs: what is next to a row in a batch must not change it.
        """
        assert self._factors is not None
        chosen = rows[:, None, None, None]
        mixed = Factors(
            torch.where(chosen, factors.to_query, self._factors.to_query),
            torch.where(chosen, factors.to_key, self._factors.to_key),
        )
        self._adopt(mixed, (keys for _, keys, _ in store.chunks()), ~rows)
        self._since = 0.0
        self._reprojections += 1
        self._reprojected_rows += len(store) * len(rows) * self._heads()

    def _adopt(
        self, factors: Factors, keys: Iterable[torch.Tensor], kept: torch.Tensor | None = None
    ) -> None:
        """Use ``factors`` from now on, with proxies of ``keys``, which are all there are.

        Batch rows where ``kept [B]`` is True have their old factors and keep all that goes with
        them.
        """
        mean, error = self._keys.mean(), self._error(factors)
        mean = mean if self.options.center else torch.zeros_like(mean)
        if kept is not None and self._mean is not None and self._expected is not None:
            mean = torch.where(kept[:, None, None], self._mean, mean)
            error = torch.where(kept[:, None], self._expected, error)
        spread = self._keys.spread(factors.to_key, self.options.center)
        self._proxies.replace(self._project(factors, mean, keys), spread, kept)
        self._factors, self._mean, self._expected = factors, mean, error

    @staticmethod
    def _project(
        factors: Factors, mean: torch.Tensor, keys: Iterable[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Proxies ``[B, F, *, r]`` fp32 of ``keys [B, Hkv, *, D]``, a piece at a time."""
        batch, heads, dim = mean.shape
        maps = factors.to_key.view(batch, heads, -1, dim, factors.to_key.shape[-1])
        for block in keys:
            for piece in block.split(PIECE, dim=2):
                centered = (piece.float() - mean.unsqueeze(2)).unsqueeze(2)
                yield (centered @ maps).flatten(1, 2)

    def _heads(self) -> int:
        assert self._mean is not None
        return self._mean.shape[1]

    def _mean_of(self, query_heads: int) -> torch.Tensor:
        assert self._mean is not None
        return self._mean.repeat_interleave(query_heads // self._mean.shape[1], dim=1)

    def _fitted(self) -> dict[str, torch.Tensor]:
        """Everything that ``_adopt`` sets beside the proxies; empty before."""
        if self._factors is None or self._mean is None or self._expected is None:
            return {}
        return {
            "to_query": self._factors.to_query,
            "to_key": self._factors.to_key,
            "mean": self._mean,
            "expected": self._expected,
        }

    def _set_fitted(self, parts: dict[str, torch.Tensor]) -> None:
        if parts:
            self._factors = Factors(parts["to_query"], parts["to_key"])
            self._mean, self._expected = parts["mean"], parts["expected"]
