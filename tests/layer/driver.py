"""Made-up tokens for the one layer of a cache, and all that may happen to it between steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_kvret import CTkvrCache, FlatKVCache, H2OCache, LRQKCache, ParisKVCache, RetrievalCache
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.layer.step import StepRecord
from hf_kvret_kernels import host_step

from ..kernels.draws import attention64

HEADS, GROUP, DIM = 2, 3, 32
SCALE = 0.4
CONFIG = LlamaConfig(
    hidden_size=HEADS * GROUP * DIM, num_hidden_layers=1, num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS, head_dim=DIM,
)  # fmt: skip
SIZES = {"sink": 2, "recent": 8, "flush": 4, "max_draft": 4, "top_k": 12, "dense_below": 0}
METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {}),
    "paris, mean": (ParisKVCache, {"group_reduce": "mean"}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, published": (LRQKCache, {"rank": 8, "factors": "als"}),
    "lrqk, in bf16": (LRQKCache, {"rank": 20, "proxy_dtype": "bfloat16"}),
    "ctkvr": (CTkvrCache, {}),
    "h2o": (H2OCache, {}),
}
# Sums of some hundred products, in another order.
ERROR = 2e-5


@contextmanager
def step_by_step() -> Iterator[None]:
    """Indexes, stores and windows do their parts one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_step, "library", lambda: None)
        patch.setattr(host_step, "run_unchecked", None)
        yield


def full_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest tokens, causal among them, in float64; 0 where all is hidden."""
    group, (length, count) = query.shape[1] // keys.shape[1], (keys.shape[2], query.shape[2])
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    if scoring.valid is not None:
        seen = seen & scoring.valid[:, None, None]
    sinks = None if sinks is None else sinks.view(-1, 1, 1)
    return attention64(query, keys, values, seen, scoring.scale, scoring.softcap, sinks)[0]


class Driver:
    """Passes made-up tokens through the one layer of a cache.

    Attributes:
        keys: ``[B, HEADS, T, DIM]`` of all tokens held, as are ``values``.
        mask: ``[B, T]`` bool of them.
        query: of the last pass.
        ids: what was selected in the last pass; None: nothing was, or it is not looked at.
        repeats: whether steps like the one before are done again, as attention does them.
        repeated: how many were.
    """

    def __init__(
        self,
        kind: type[RetrievalCache] = FlatKVCache,
        softcap: float | None = None,
        sinks: bool = False,
        repeats: bool = False,
        **options: Any,
    ) -> None:
        self.cache = kind(CONFIG, **{**SIZES, **options})
        self.repeats, self.repeated, self.scale = repeats, 0, SCALE
        self.softcap = softcap
        self.generator = torch.Generator().manual_seed(0)
        self.sink_logits = torch.randn(HEADS * GROUP, generator=self.generator) if sinks else None
        self.keys = self.values = torch.empty(2, HEADS, 0, DIM)
        self.mask = torch.ones(2, 0, dtype=torch.bool)
        self.ids: torch.Tensor | None = None
        self.query = torch.empty(0)

    @property
    def layer(self) -> RetrievalLayer:
        (layer,) = self.cache.layers
        assert isinstance(layer, RetrievalLayer)
        return layer

    @property
    def kv(self) -> Any:
        """What the layer holds, after the first pass."""
        return self.layer.kv

    def forward(self, count: int, padded: int = 0) -> torch.Tensor:
        """Attention of ``count`` new tokens, of which the last row has ``padded`` of padding."""
        batch, layer = len(self.mask), self.layer
        new = torch.ones(batch, count, dtype=torch.bool)
        new[-1, :padded] = False
        self.mask = torch.cat([self.mask, new], dim=1)
        query, key, value = (
            torch.randn(batch, heads, count, DIM, generator=self.generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        # Means that are not 0.
        key, value = key + 0.5, value + 1.0
        self.keys = torch.cat([self.keys, key], dim=2)
        self.values = torch.cat([self.values, value], dim=2)
        scoring = Scoring(None if self.mask.all() else self.mask, self.scale, self.softcap)
        self.ids, self.query = None, query
        # The model's own attention, which does the first pass.
        dense = self.exact().to(query.dtype)
        key, value = self.cache.update(key, value, 0)
        call = AttentionCall(scoring, lambda: dense, self.sink_logits)
        if self.repeats:
            again = None
            if scoring.valid is None and self.sink_logits is None:
                again = layer.attend_again(query, key, value, scoring)
            self.repeated += again is not None
            return layer.attend(query, key, value, call) if again is None else again.transpose(1, 2)
        own = layer.subscribers
        layer.subscribers = (*own, self._keep_ids)  # type: ignore[assignment]
        try:
            return layer.attend(query, key, value, call)
        finally:
            layer.subscribers = own

    def _keep_ids(self, record: StepRecord) -> None:
        self.ids = record.ids

    def exact(self) -> torch.Tensor:
        """The last pass by full attention, in float64."""
        scoring = Scoring(self.mask, self.scale, self.softcap)
        return full_attention(self.query, self.keys, self.values, scoring, self.sink_logits)

    def crop(self, count: int) -> None:
        """Drop the newest tokens."""
        self.cache.crop(-count)
        kept = self.mask.shape[1] - count
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.mask = self.mask[:, :kept]

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.keys, self.values, self.mask = self.keys[rows], self.values[rows], self.mask[rows]

    def fork(self, **changes: Any) -> Driver:
        """Another that goes on from here, with other options."""
        twin = copy.copy(self)
        twin.cache = self.cache.fork(**changes)
        return twin

    def life(self, padded: int = 11) -> Iterator[torch.Tensor]:
        """Results of steps, between all that may happen to a cache."""
        self.forward(90, padded)
        for count in (*[1] * 6, 4):
            yield self.forward(count)
        self.layer.kv = copy.deepcopy(self.kv)
        self.crop(3)
        yield self.forward(2)
        for rows in ([1, 0], [0, 0]):
            self.reorder(rows)
            for _ in range(3):
                yield self.forward(1)
        # Into the cold tokens.
        self.crop(40)
        for _ in range(4):
            yield self.forward(1)
        twin = self.fork()
        self.forward(30)
        yield self.forward(1)
        # The fork goes on from where it was taken.
        vars(self).update(vars(twin))
        for _ in range(4):
            yield self.forward(1)
