"""H2OIndex in the regions of a layer, for tests: prompts, passes, crops, forks."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from hf_kvret import ColdTokens
from hf_kvret.contracts.index import Scoring
from hf_kvret.contracts.store import FirstRows
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.methods.h2o import H2OConfig, H2OIndex
from hf_kvret.stores.memory import DeviceMemory

from .watched_stores import WatchedStore, normal

HEADS, GROUP, DIM = 2, 3, 16
SCALE = 3 / math.sqrt(DIM)
OPTIONS: dict[str, Any] = {
    "top_k": 0.25,
    "sink": 2,
    "recent": 6,
    "flush": 4,
    "max_draft": 5,
    "dense_below": 0,
}
Tokens = tuple[torch.Tensor, torch.Tensor]


def random_tokens(seed: int, count: int = 1, batch: int = 2) -> Tokens:
    """Queries and keys, some of which all queries like."""
    queries = normal(seed, batch, HEADS * GROUP, count, DIM) + 0.3
    return queries, normal(seed + 10_000, batch, HEADS, count, DIM)


def _store(first: FirstRows) -> WatchedStore:
    return WatchedStore(DeviceMemory(first.device))


class Run:
    """An index in the regions of a layer, asked as the layer asks."""

    def __init__(self, softcap: float | None = None, batch: int = 2, **changes: Any) -> None:
        self.options = H2OConfig.from_options(**{**OPTIONS, **changes})
        keys = torch.empty(batch, HEADS, 0, DIM)
        self.softcap, self.batch = softcap, batch
        # The validity of all tokens; None: there is no padding.
        self.mask: torch.Tensor | None = None
        self.kv = LayerKV(self.options, H2OIndex(self.options), _store, keys, keys)

    @property
    def index(self) -> H2OIndex:
        assert isinstance(self.kv.index, H2OIndex)
        return self.kv.index

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def cold_len(self) -> int:
        return self.kv.cold_len

    @property
    def valid(self) -> torch.Tensor:
        """``[B, T]``, of all tokens."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.batch, self.length, dtype=torch.bool)

    @property
    def scores(self) -> torch.Tensor:
        return self.index.state_dict()["scores"].clone()

    @property
    def evicted(self) -> torch.Tensor:
        return self.scores == float("-inf")

    @property
    def cold(self) -> ColdTokens | None:
        return self.kv.cold(Scoring(self.mask, SCALE, self.softcap))

    def prompt(self, tokens: Tokens, valid: torch.Tensor | None = None) -> None:
        """A pass that is attended exactly."""
        self._watch(tokens, valid)
        self.kv.take_prompt(tokens[1], tokens[1], self.mask)

    def _watch(self, tokens: Tokens, valid: torch.Tensor | None) -> None:
        queries, keys = tokens
        if valid is not None or self.mask is not None:
            new = torch.ones(len(keys), keys.shape[2], dtype=torch.bool)
            new = new if valid is None else valid
            self.mask = torch.cat([self.valid, new], dim=1)
        self.kv.on_forward(queries, keys, self.mask)

    def build(self) -> None:
        cold = self.cold
        if cold is not None:
            self.kv.build_index(cold)

    def step(self, tokens: Tokens) -> torch.Tensor:
        """The slots that a pass selects."""
        queries, keys = tokens
        self.build()
        self._watch(tokens, None)
        self.kv.take_step(keys, keys, self.mask)
        return self.ask(queries)

    def ask(self, queries: torch.Tensor) -> torch.Tensor:
        cold = self.cold
        assert cold is not None
        index = self.kv.ready_index(cold)
        ids = index.search(queries, cold)
        index.after_search(ids)
        return ids

    def steps(self, seeds: range, rows: list[int] | None = None) -> list[torch.Tensor]:
        """The selections of one query a seed, of two sequences or of ``rows`` of them."""
        some = slice(None) if rows is None else rows
        passes = (random_tokens(seed) for seed in seeds)
        return [self.step((queries[some], keys[some])) for queries, keys in passes]

    def fork(self) -> Run:
        self.build()
        twin = copy.copy(self)
        twin.kv = self.kv.fork()
        return twin

    def crop(self, count: int) -> None:
        """Drop the newest ``count`` tokens."""
        self.kv.crop(self.kv.length - count)
        self.mask = None if self.mask is None else self.mask[:, :-count]
