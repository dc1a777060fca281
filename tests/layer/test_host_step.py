"""A layer's step in one call of the CPU library does what it does step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_kvret import CTkvrCache, FlatKVCache, H2OCache, LRQKCache, ParisKVCache, RetrievalCache
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.methods.flat import FlatIndex
from hf_kvret_kernels import host_step

HEADS, GROUP, DIM = 2, 2, 32
# Sums of some hundred products, in another order.
ERROR = 2e-5
SIZES = {"sink": 2, "recent": 8, "flush": 4, "max_draft": 4, "top_k": 12, "dense_below": 0}

METHODS: dict[str, tuple[type[RetrievalCache], dict[str, object]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {}),
    "paris, nibbles": (ParisKVCache, {"subspace_dim": 4, "group_reduce": "mean"}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, published": (LRQKCache, {"rank": 8, "factors": "als"}),
    "h2o": (H2OCache, {}),
    "ctkvr": (CTkvrCache, {}),
    "lrqk, a set for each head": (LRQKCache, {"rank": 20, "shared": False, "proxy_dtype": "int8"}),
}

pytestmark = pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled")


@contextmanager
def step_by_step() -> Iterator[None]:
    """Indexes, stores and windows do their parts one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_step, "why_not", lambda: "switched off by a test")
        yield


def make_cache(kind: type[RetrievalCache], **options: object) -> RetrievalCache:
    config = LlamaConfig(
        hidden_size=HEADS * GROUP * DIM,
        num_hidden_layers=1,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
    )
    return kind(config, **{**SIZES, **options})


class Driver:
    """Passes made-up tokens through the one layer of a cache."""

    def __init__(self, cache: RetrievalCache, softcap: float | None, sinks: bool) -> None:
        self.cache, self.softcap = cache, softcap
        self.generator = torch.Generator().manual_seed(0)
        self.sink_logits = torch.randn(HEADS * GROUP, generator=self.generator) if sinks else None
        self.mask = torch.ones(2, 0, dtype=torch.bool)

    @property
    def layer(self) -> RetrievalLayer:
        (layer,) = self.cache.layers
        assert isinstance(layer, RetrievalLayer)
        return layer

    def forward(self, count: int, padded: int = 0) -> torch.Tensor:
        """Attention of ``count`` new tokens, of which row 1 has ``padded`` of padding first."""
        batch = len(self.mask)
        new = torch.ones(batch, count, dtype=torch.bool)
        new[-1, :padded] = False
        self.mask = torch.cat([self.mask, new], dim=1)
        draw = [
            torch.randn(batch, heads, count, DIM, generator=self.generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        ]
        valid = None if self.mask.all() else self.mask
        scoring = Scoring(valid, DIM**-0.5, self.softcap)
        key, value = self.layer.update(draw[1], draw[2])
        call = AttentionCall(scoring, lambda: torch.zeros_like(draw[0]), self.sink_logits)
        return self.layer.attend(draw[0], key, value, call)

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.mask = self.mask[:, :-count]

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.mask = self.mask[rows]


def everything(driver: Driver) -> list[torch.Tensor]:
    """Results of all that may happen to a cache between steps."""
    driver.forward(150, padded=11)
    results = [driver.forward(1) for _ in range(15)]
    results.append(driver.forward(4))
    driver.crop(3)
    results.append(driver.forward(2))
    driver.reorder([1, 0])
    results.append(driver.forward(1))
    driver.reorder([0, 0])
    results += [driver.forward(1) for _ in range(6)]
    driver.crop(40)
    results += [driver.forward(1) for _ in range(3)]
    fork = driver.cache.fork()
    driver.forward(30)
    results += [driver.forward(1) for _ in range(2)]
    # The fork goes on from where it was taken.
    driver.cache, driver.mask = fork, driver.mask[:, : fork.get_seq_length()]
    results += [driver.forward(1) for _ in range(8)]
    return results


@pytest.mark.factor("method", list(METHODS))
@pytest.mark.factor("store", ["device", "host", "cpu"])
@pytest.mark.factor("softcap", [None, 4.0])
@pytest.mark.factor("sinks", [False, True])
def test_one_call_is_all_the_steps(
    method: str, store: str, softcap: float | None, sinks: bool
) -> None:
    kind, options = METHODS[method]
    caches = [make_cache(kind, store=store, track_recall=True, **options) for _ in range(2)]
    got = everything(Driver(caches[0], softcap, sinks))
    with step_by_step():
        expected = everything(Driver(caches[1], softcap, sinks))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=ERROR)
    one, other = (cache.stats()["layers"][0] for cache in caches)
    assert one["selected"] > 0
    assert "recall_mass" in one
    assert one.keys() == other.keys()
    for name, value in one.items():
        close = pytest.approx(other[name], rel=1e-5) if isinstance(value, float) else other[name]
        assert value == close, name


def test_a_step_that_fails_counts_nothing_and_is_dropped_by_a_crop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room for the work space")

    driver = Driver(make_cache(ParisKVCache), None, False)
    driver.forward(100)
    driver.forward(1)
    before = driver.cache.stats()
    monkeypatch.setattr(host_step, "run_unchecked", no_room)
    with pytest.raises(MemoryError, match="no room"):
        driver.forward(1)
    assert driver.cache.stats() == before
    with pytest.raises(RuntimeError, match="has not attended yet"):
        driver.cache.fork()
    driver.crop(1)
    assert driver.cache.get_seq_length() == 100


def test_stores_and_indexes_that_give_no_descriptor_are_asked_step_by_step() -> None:
    for options in ({"store": "resident"}, {"store": "higgs"}):
        driver = Driver(make_cache(ParisKVCache, **options), None, False)
        driver.forward(100)
        driver.forward(1)
        assert driver.cache.stats()["layers"][0]["selected"] > 0


WITH_OWN_SEARCH = [name for name in METHODS if name != "h2o"]


@pytest.mark.parametrize("method", WITH_OWN_SEARCH)
def test_no_part_of_a_step_is_left_to_the_search_in_torch(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = METHODS[method]
    driver = Driver(make_cache(kind, **options), None, False)
    driver.forward(150)
    index = driver.layer.kv.index  # type: ignore[union-attr]

    def search(*args: object) -> None:
        raise AssertionError("the library can do this search")

    monkeypatch.setattr(type(index), "search", search)
    for count in (1, 1, 3):
        driver.forward(count)
    assert driver.cache.stats()["layers"][0]["selected"] > 0


def test_other_options_take_effect_at_the_next_step() -> None:
    """What an index and the counters keep from step to step is for the options they had."""
    caches = [make_cache(ParisKVCache, per_selected=1.0) for _ in range(2)]
    changed, fresh = (Driver(cache, None, False) for cache in caches)
    for driver in (changed, fresh):
        driver.forward(150)
        driver.forward(1)
        driver.cache = driver.cache.fork(top_k=130)
    got = changed.forward(1)
    with step_by_step():
        torch.testing.assert_close(got, fresh.forward(1), rtol=1e-5, atol=ERROR)
    searches = 2 * HEADS
    assert changed.cache.stats()["layers"][0]["candidates"] == 130 * searches
    # Of the same layer, too.
    changed.layer.set_options(changed.cache.options.replace(top_k=140), lambda: None)
    changed.forward(1)
    assert changed.cache.stats()["layers"][0]["candidates"] == (130 + 140) * searches


def test_candidates_are_counted_anew_when_tokens_came_back() -> None:
    driver = Driver(make_cache(CTkvrCache), None, False)
    driver.forward(150)
    driver.forward(1)
    layer = driver.layer
    driver.crop(60)
    while layer.cold_len < 142:
        driver.forward(1)
    before = driver.cache.stats()["layers"][0]["candidates"]
    driver.forward(1)
    index, kv = layer.kv.index, layer.kv  # type: ignore[union-attr]
    assert index is not None and kv is not None
    each = index.cost(layer.cold_len, kv.config.budget(layer.cold_len)).candidates
    assert driver.cache.stats()["layers"][0]["candidates"] - before == each * 2 * HEADS


class NewestIndex(FlatIndex):
    """Another search, and the description that it inherits."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        newest = torch.arange(len(cold) - cold.budget, len(cold), dtype=torch.int32)
        return newest.expand(len(query), HEADS, query.shape[2], -1).contiguous()


def test_an_index_that_replaces_its_search_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatKVCache, "make_index", lambda *args: NewestIndex())
    searches: list[int] = []
    drivers = [Driver(make_cache(FlatKVCache), None, False) for _ in range(2)]
    for driver in drivers:
        driver.forward(60)
    got = drivers[0].forward(1)
    with step_by_step():
        torch.testing.assert_close(got, drivers[1].forward(1), rtol=1e-5, atol=ERROR)
    index = drivers[0].layer.kv.index  # type: ignore[union-attr]
    assert index is not None
    own = index.search
    # So is one object's.
    monkeypatch.setattr(index, "search", lambda *args: searches.append(1) or own(*args))
    drivers[0].forward(1)
    assert searches == [1]


@contextmanager
def torch_default(default: torch.dtype | str) -> Iterator[None]:
    """Another default dtype or default device of torch."""
    if isinstance(default, str):
        with torch.device(default):
            yield
        return
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.factor("method", list(METHODS))
@pytest.mark.factor("default", [torch.float64, torch.bfloat16, "meta"])
@pytest.mark.factor("whole", [True, False])
def test_defaults_of_torch_do_not_matter(
    method: str, default: torch.dtype | str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = METHODS[method]
    attend = RetrievalLayer.attend

    def attend_with_default(layer: RetrievalLayer, *args: Any) -> torch.Tensor:
        with torch_default(default):
            return attend(layer, *args)

    def steps() -> list[torch.Tensor]:
        driver = Driver(make_cache(kind, **options), 4.0, True)
        driver.forward(60, padded=3)
        results = [driver.forward(count) for count in (1, 1, 3, 1)]
        driver.crop(20)
        return [*results, driver.forward(1)]

    with nullcontext() if whole else step_by_step():
        expected = steps()
        monkeypatch.setattr(RetrievalLayer, "attend", attend_with_default)
        got = steps()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


class OppositeIndex(FlatIndex):
    """Searches for what a query is least like, which the CPU library can't do."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        return super().search(-query, cold)

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> None:
        """None: the CPU library would search for the query itself."""


class OppositeCache(FlatKVCache):
    """Attends to the tokens that attention needs least."""

    @classmethod
    def make_index(cls, options: Any, layer: int) -> OppositeIndex:
        return OppositeIndex()


def test_an_index_that_replaces_a_part_of_its_search_says_so() -> None:
    got = everything(Driver(make_cache(OppositeCache), None, False))
    with step_by_step():
        expected = everything(Driver(make_cache(OppositeCache), None, False))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=ERROR)
