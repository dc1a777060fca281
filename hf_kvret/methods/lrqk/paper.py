"""PaperLRQKIndex: LRQK as published, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.index import ColdTokens, Index
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.decoding import Bases, Seen
from hf_kvret.methods.lrqk.factors import alternating
from hf_kvret.methods.lrqk.proxies import Proxies
from hf_kvret.methods.lrqk.sketches import STARTS, Moments
from hf_kvret.methods.lrqk.waiting import WaitingTokens
from hf_kvret.stores import Store
from hf_kvret_kernels import proxy
from hf_kvret_kernels.top_k import top_k

_MOMENTS = ("queries", "keys")


class PaperLRQKIndex(Index):
    """Algorithms 1 and 2: ALS factors for each query head, and solves at every step.

    Each query head selects for itself. A step solves for the proxies of its query and key,
    fitted to the keys on the device in the step before (the selected ones and the ``lite``
    newest), and moves B_Q and B_K a little. Tokens in the window have proxies that wait.

    Departures: the factors come from Gram matrices, with the same result (see ``alternating``); a
    prompt is factorized when the first token after it is decoded, so that it may come in
    pieces; a pass of several tokens takes their steps one after the other; of a prompt's tokens
    that are in the window then, all but the newest ``max(lite, max_draft)`` get the proxies of
    algorithm 2's first guess, when they leave it.
    """

    def __init__(self, options: LRQKConfig) -> None:
        self.options = options
        self._chance = torch.Generator().manual_seed(options.seed)
        self._moments = {name: Moments(STARTS[options.init].random) for name in _MOMENTS}
        self._proxies = Proxies(options.proxy_dtype)
        self._waiting = WaitingTokens(self._room(options))
        self._bases: Bases | None = None
        self._selected: torch.Tensor | None = None
        self._seen: Seen | None = None
        # Of the newest pass, which select is about.
        self._valid: torch.Tensor | None = None

    def watch(
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
            # Rows of zeros add nothing to any product below, so padding takes no part.
            queries, keys = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (queries, keys))
        if self._bases is None:
            group = queries.shape[1] // keys.shape[1]
            self._moments["queries"].add(queries, rank, self._chance)
            self._moments["keys"].add(keys.repeat_interleave(group, dim=1), rank, self._chance)
        self._waiting.add(keys, start, self._bases)

    def observe(self, block: TokenBlock) -> None:
        """Nothing: ``watch`` saw the keys, and ``build`` projects them."""

    def build(self, cold: ColdTokens) -> None:
        options = self.options
        queries, keys = (self._moments[name] for name in _MOMENTS)
        if not queries.sums:
            raise RuntimeError("no query was seen: call watch before build")
        grams = queries.sums["gram"], keys.sums["gram"]
        rank = options.rank_of(grams[0].shape[-1])
        starts = STARTS[options.init].sketches(queries, keys, rank)
        found = alternating(*grams, *starts, options.iterations, options.penalty)
        self._bases = Bases(found.query_basis, found.key_basis)
        self._waiting.start(found.to_key)
        self._proxies.replace(_project(found.to_key, cold.store))
        self._moments = {name: Moments(False) for name in _MOMENTS}

    def extend(self, block: TokenBlock) -> None:
        if self._bases is not None:
            self._proxies.append(self._waiting.leave(block, self._bases))

    def refresh(self, cold: ColdTokens) -> None:
        """Read the keys of the step before, which the next query is fitted to."""
        if self._bases is None:
            self.build(cold)
            return
        self._seen = self._waiting.seen(self.options.lite)
        if self._selected is not None:
            ids = self._selected
            keys, _ = cold.store.gather(ids)
            places = ids[:, :, 0].clamp(min=0).long().unsqueeze(-1)
            rows = self._proxies.rows
            proxies = rows.gather(2, places.expand(*places.shape[:3], rows.shape[-1]))
            proxies = self._proxies.values(proxies).masked_fill(ids[:, :, 0, :, None] < 0, 0.0)
            self._seen = self._seen.plus(Seen.of(keys[:, :, 0], proxies))

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self._bases is None:
            raise RuntimeError("the index is empty: watch, observe and build first")
        options, count = self.options, query.shape[2]
        if self._valid is not None:
            # Neither query nor key of padding moves the bases.
            query = query.masked_fill(~self._valid[:, None, :, None], 0.0)
        keys = self._waiting.newest(count, query.shape[1])
        of_queries, of_keys, bases = [], [], self._bases
        for number in range(count):
            pair = query[:, :, number].float(), keys[:, :, number]
            q_hat, k_hat, bases = bases.step(*pair, self._seen, options.iterations, options.penalty)
            of_queries.append(q_hat)
            of_keys.append(k_hat)
        self._bases = bases
        self._waiting.settle(torch.stack(of_keys, dim=2))
        proxies = self._proxies.weigh(torch.stack(of_queries, dim=2)) * scale
        scores = proxy.relevance(
            proxies, self._proxies.rows, query.shape[1], valid=valid, softcap=softcap
        )
        ids = top_k(scores, budget)
        self._selected = ids[:, :, -1:]
        return ids

    def uncapturable(self) -> str | None:
        return "the published lrqk keeps the tokens that wait for a flush on the host"

    def candidates(self, cold_len: int, budget: int) -> int:
        """0: proxies alone choose."""
        return 0

    def reorder(self, rows: torch.Tensor) -> None:
        for moments in self._moments.values():
            moments.reorder(rows)
        self._proxies.reorder(rows)
        self._waiting.reorder(rows)
        if self._bases is not None:
            bases = (part.index_select(0, rows) for part in (self._bases.query, self._bases.key))
            self._bases = Bases(*bases)
        if self._selected is not None:
            self._selected = self._selected.index_select(0, rows)

    def crop(self, cold_len: int) -> None:
        if cold_len == 0:
            vars(self).update(vars(type(self)(self.options)))
        self._proxies.crop(cold_len)
        self._selected = None

    def fork(self) -> Self:
        twin = type(self)(self.options)
        twin._chance.set_state(self._chance.get_state())
        twin._moments = {name: moments.fork() for name, moments in self._moments.items()}
        twin._proxies, twin._waiting = self._proxies.fork(), self._waiting.fork()
        twin._bases, twin._selected = self._bases, self._selected
        return twin

    def set_options(self, options: Any) -> None:
        super().set_options(options)
        self._waiting.room = self._room(options)

    def nbytes(self) -> int:
        size = sum(moments.nbytes() for moments in self._moments.values())
        if self._bases is not None:
            size += self._bases.query.nbytes + self._bases.key.nbytes
        return size + self._proxies.nbytes() + self._waiting.nbytes()

    def select_nbytes(self) -> int:
        """All proxies, the bases twice (also written), and the keys that a query is fitted to."""
        if self._bases is None:
            return 0
        rows = self._proxies.rows
        fitted = self._waiting.nbytes()
        if self._selected is not None and self._waiting.keys is not None:
            keys = self._waiting.keys
            fitted += self._selected.numel() * keys.shape[-1] * keys.element_size()
        return rows.nbytes + 2 * (self._bases.query.nbytes + self._bases.key.nbytes) + fitted

    def state_dict(self) -> dict[str, torch.Tensor]:
        parts: dict[str, dict[str, torch.Tensor]] = {"waiting": self._waiting.state_dict()}
        if self._bases is None:
            parts |= {name: moments.sums for name, moments in self._moments.items()}
            parts["chance"] = {"state": self._chance.get_state()}
        else:
            parts["proxies"] = self._proxies.state_dict()
            parts["bases"] = {"query": self._bases.query, "key": self._bases.key}
        if self._selected is not None:
            parts["selected"] = {"ids": self._selected}
        return {
            f"{part}.{name}": x.contiguous()
            for part, found in parts.items()
            for name, x in found.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {
                name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
            }

        built = any(name.startswith("bases.") for name in state)
        self._waiting.load_state_dict(part("waiting."), built)
        if built:
            self._bases = Bases(state["bases.query"], state["bases.key"])
            self._proxies.load_state_dict(part("proxies."))
        else:
            for name, moments in self._moments.items():
                moments.load_state_dict(part(f"{name}."))
            self._chance.set_state(state["chance.state"].cpu())
        self._selected = self._checked(state.get("selected.ids"))

    @staticmethod
    def _room(options: LRQKConfig) -> int:
        """Tokens that a step may fit its query to, or be about."""
        return max(options.lite, options.max_draft)

    def _checked(self, ids: torch.Tensor | None) -> torch.Tensor | None:
        """``ids`` of a file, which kernels read rows by, or ValueError."""
        if ids is None:
            return None
        held = self._proxies.rows.shape[2] if self._bases is not None else 0
        if ids.dtype != torch.int32 or not bool(((ids >= -1) & (ids < held)).all()):
            raise ValueError(
                f"the cache was saved with selected tokens {ids.dtype} from {int(ids.min())} to "
                f"{int(ids.max())}, and {held} are cold: the file is damaged or crafted, save the "
                "cache again"
            )
        return ids


def _project(to_key: torch.Tensor, store: Store) -> Iterator[torch.Tensor]:
    """Proxies ``[B, Hq, *, r]`` of all keys in the store."""
    batch, _, dim, rank = to_key.shape
    for _, keys, _ in store.chunks():
        maps = to_key.view(batch, keys.shape[1], -1, dim, rank)
        yield (keys.float().unsqueeze(2) @ maps).flatten(1, 2)
