"""One layer against a plain dense cache: random prompts, steps, drafts, crops, reorders, masks.

The budget covers everything, so that whatever the index prefers, attention must equal full
attention; then every lost, doubled or stale token shows.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from hf_kvret import (
    Index,
    RetrievalConfig,
    TokenBlock,
)
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.contracts.store import FirstRows
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret.methods.paris import ParisConfig, ParisIndex
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory
from hf_kvret.testing import held_tokens

from .driver import full_attention

CPU = torch.device("cpu")
HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 12, 8
SCALE, SOFTCAP = 0.9, 4.0
SIZES: dict[str, Any] = {
    "top_k": 1.0,
    "sink": 2,
    "recent": 5,
    "flush": 4,
    "max_draft": 4,
    "dense_below": 0,
}


def _store(kind: type[PageMemory], first: FirstRows) -> Store:
    return PagedStore(kind(first.device), page_len=4)


class Dense:
    """A layer and, beside it, all its tokens as plain tensors."""

    def __init__(self, layer: RetrievalLayer, batch: int, sink_logits: torch.Tensor | None) -> None:
        self.layer = layer
        self.sink_logits = sink_logits
        self.softcap = None if sink_logits is None else SOFTCAP
        self.keys = torch.empty(batch, HEADS, 0, KEY_DIM)
        self.values = torch.empty(batch, HEADS, 0, VALUE_DIM)
        self.valid = torch.empty(batch, 0, dtype=torch.bool)

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def feed(self, query: torch.Tensor, valid: torch.Tensor, generator: torch.Generator) -> None:
        """Give new tokens to both and compare the answers where the query is a real token."""
        batch, _, count, _ = query.shape
        key = torch.randn(batch, HEADS, count, KEY_DIM, generator=generator)
        value = torch.randn(batch, HEADS, count, VALUE_DIM, generator=generator)
        self.keys = torch.cat([self.keys, key], dim=2)
        self.values = torch.cat([self.values, value], dim=2)
        self.valid = torch.cat([self.valid, valid], dim=1)
        expected = self.attention(query)
        mask = None if bool(self.valid.all()) else self.valid
        call = AttentionCall(Scoring(mask, SCALE, self.softcap), lambda: expected, self.sink_logits)
        given = self.layer.update(key, value)
        out = self.layer.attend(query, *given, call)
        assert out.dtype == query.dtype and out.shape == expected.shape
        error = (out - expected).abs().amax(dim=(1, 3))[valid]
        # fp32 against fp64; values around 1, merged from at most three parts and some chunks.
        assert not error.isnan().any() and (error < 1e-5).all(), f"{error.max():.1e}"

    def attention(self, query: torch.Tensor) -> torch.Tensor:
        """Full causal attention of the newest queries."""
        scoring = Scoring(self.valid, SCALE, self.softcap)
        return full_attention(query, self.keys, self.values, scoring, self.sink_logits).float()

    def crop(self, count: int) -> None:
        self.layer.crop(torch.tensor(-count) if count % 2 else -count)
        kept = self.length - count
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.valid = self.valid[:, :kept]

    def reorder(self, rows: torch.Tensor) -> None:
        self.layer.reorder_cache(rows)
        self.keys, self.values, self.valid = self.keys[rows], self.values[rows], self.valid[rows]

    def fork(self) -> Dense:
        twin = Dense(self.layer.fork(), len(self.keys), self.sink_logits)
        twin.keys, twin.values, twin.valid = self.keys, self.values, self.valid
        return twin

    def reload(self, empty: RetrievalLayer) -> None:
        """Go on with a layer that was saved and loaded."""
        empty.load_state_dict(self.layer.state_dict(), CPU)
        self.layer = empty

    def check(self) -> None:
        """What the layer holds are the tokens given, each in its slot."""
        assert self.layer.get_seq_length() == self.length
        kv = self.layer.kv
        if kv is None:
            return
        keys, values = held_tokens(kv)
        assert torch.equal(keys, self.keys)
        assert torch.equal(values, self.values)


def _new_valid(choose: random.Random, dense: Dense, count: int) -> torch.Tensor:
    """Validity of new tokens: now and then padding on the left of a row, the last one is real."""
    valid = torch.ones(len(dense.keys), count, dtype=torch.bool)
    for row in range(len(valid)):
        if choose.random() < 0.4:
            valid[row, : choose.randrange(count)] = False
    return valid


@pytest.mark.factor("seed", range(2))
@pytest.mark.factor("method", ["flat", "paris"])
@pytest.mark.factor("sinks", [0, 2])
def test_any_history_attends_like_a_dense_cache(method: str, seed: int, sinks: int) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    config: RetrievalConfig
    if method == "flat":
        config, index = FlatConfig(**{**SIZES, "sink": sinks}), FlatIndex
    else:
        config = ParisConfig(**{**SIZES, "sink": sinks})
        index = partial(ParisIndex, config)  # type: ignore[assignment]
    memory = choose.choice([DeviceMemory, HostMemory])

    def new_layer() -> RetrievalLayer:
        return RetrievalLayer(config, index, partial(_store, memory))

    logits = torch.randn(HEADS * GROUP, generator=generator) if seed == 0 else None
    pool = [Dense(new_layer(), 2, logits)]
    cold = 0
    for _ in range(60):
        place = choose.randrange(len(pool))
        dense = pool[place]
        kind = choose.choice(["step"] * 6 + ["draft"] * 3 + ["prompt", "crop", "reorder", "fork"])
        if kind in ("step", "draft", "prompt"):
            sizes = {"step": (1, 1), "draft": (2, 4), "prompt": (5, 30)}
            count = choose.randint(*sizes[kind])
            valid = _new_valid(choose, dense, count)
            shape = (len(dense.keys), HEADS * GROUP, count, KEY_DIM)
            dense.feed(torch.randn(shape, generator=generator), valid, generator)
            if kind == "draft":
                dense.crop(choose.randint(0, count - 1))
        elif kind == "crop":
            dense.crop(choose.randint(0, min(dense.length, 25)))
        elif kind == "reorder" and dense.length:
            count = choose.randint(1, 3)
            dense.reorder(torch.tensor([choose.randrange(len(dense.keys)) for _ in range(count)]))
        elif kind == "fork":
            if len(pool) == 3:
                pool.pop(place)
            elif choose.random() < 0.5:
                pool.append(dense.fork())
            elif dense.length:
                dense.reload(new_layer())
        for each in pool:
            each.check()
        cold = max(cold, *(d.layer.kv.cold_len for d in pool if d.layer.kv), 0)
    assert cold > 20, "this history never made tokens cold"


def _kv(config: FlatConfig, index: Index | None = None, batch: int = 1) -> LayerKV:
    like = torch.empty(batch, 1, 0, 2), torch.empty(batch, 1, 0, 2)
    return LayerKV(config, index or FlatIndex(), partial(_store, DeviceMemory), *like)


def _tokens(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 1, count, 2)


def test_a_prompt_leaves_exactly_the_recent_tokens_in_the_window() -> None:
    kv = _kv(FlatConfig(**SIZES))
    kv.take_prompt(_tokens(20), _tokens(20), None)
    assert (kv.cold_len, kv.window.length, kv.length) == (15, 5, 20)


def test_a_step_flushes_only_what_came_before_it() -> None:
    kv = _kv(FlatConfig(**SIZES))
    held = []
    for _ in range(15):
        kv.take_step(_tokens(1), _tokens(1), None)
        held.append((kv.cold_len, kv.window.length))
    assert held[8] == (0, 9), "recent + flush tokens fill the window"
    assert held[9] == (4, 6), "the tenth comes behind the five that stay"
    assert held[13] == (8, 6)


def test_short_caches_keep_everything_in_the_window() -> None:
    kv = _kv(FlatConfig(**{**SIZES, "dense_below": 40}))
    kv.take_prompt(_tokens(30), _tokens(30), None)
    for _ in range(9):
        kv.take_step(_tokens(1), _tokens(1), None)
    assert kv.cold_len == 0 and kv.store is None
    kv.take_step(_tokens(1), _tokens(1), None)
    kv.take_step(_tokens(1), _tokens(1), None)
    assert kv.cold_len == 35 and kv.length == 41


def _ready(kv: LayerKV) -> None:
    cold = kv.cold(Scoring(None, 1.0))
    assert cold is not None
    kv.ready_index(cold)


class Recorder(FlatIndex):
    """Notes the calls that an index gets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def add(self, block: TokenBlock) -> None:
        super().add(block)
        self.calls.append(("add", block.start, block.end))

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        assert valid is None and queries.shape[2] == keys.shape[2]
        self.calls.append(("on_forward", start, start + queries.shape[2]))

    def build(self, cold: ColdTokens) -> None:
        self.calls.append(("build", 0, len(cold)))

    def before_search(self, cold: ColdTokens) -> None:
        self.calls.append(("before_search", 0, len(cold)))


def test_an_index_hears_of_every_token_once_and_is_built_once() -> None:
    index = Recorder()
    kv = _kv(FlatConfig(**SIZES), index)
    for count in (20, 8):
        kv.on_forward(_tokens(count), _tokens(count), None)
        kv.take_prompt(_tokens(count), _tokens(count), None)
    _ready(kv)
    _ready(kv)
    for _ in range(5):
        kv.take_step(_tokens(1), _tokens(1), None)
    _ready(kv)
    assert index.calls == [
        ("on_forward", 0, 20),
        ("add", 0, 15),
        ("on_forward", 20, 28),
        ("add", 15, 20),
        ("add", 20, 23),
        ("build", 0, 23),
        ("before_search", 0, 23),
        ("add", 23, 27),
        ("before_search", 0, 27),
    ]


def test_an_index_sees_which_of_the_new_tokens_are_padding() -> None:
    seen = []

    class Watcher(FlatIndex):
        def on_forward(
            self,
            queries: torch.Tensor,
            keys: torch.Tensor,
            start: int,
            valid: torch.Tensor | None,
            positions: torch.Tensor | None = None,
        ) -> None:
            seen.append(valid)

    kv = _kv(FlatConfig(**SIZES), Watcher())
    valid = torch.tensor([[False, True, True, False, True]])
    kv.on_forward(_tokens(3), _tokens(3), valid[:, :3])
    kv.take_prompt(_tokens(3), _tokens(3), valid[:, :3])
    kv.on_forward(_tokens(2), _tokens(2), valid)
    assert [part.tolist() for part in seen] == [[[False, True, True]], [[False, True]]]


def test_sinks_padding_and_holes_cannot_be_selected() -> None:
    kv = _kv(FlatConfig(**SIZES), batch=2)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[0, :3] = False
    valid[1, 4] = False
    kv.take_prompt(_tokens(20, 2), _tokens(20, 2), valid)
    open_slots = [row.nonzero().flatten().tolist() for row in kv.retrievable(valid)]
    assert open_slots == [list(range(5, 15)), [2, 3, *range(5, 15)]]


def test_an_index_is_built_again_after_a_crop_to_nothing() -> None:
    index = Recorder()
    kv = _kv(FlatConfig(**SIZES), index)
    for _ in range(2):
        kv.take_prompt(_tokens(20), _tokens(20), None)
        _ready(kv)
        kv.crop(0)
    assert [call for call, *_ in index.calls].count("build") == 2
