"""One layer against a plain dense cache: random prompts, steps, drafts, crops, reorders, masks.

The budget covers everything, so that whatever the index prefers, attention must equal full
attention; then every lost, doubled or stale token shows.
"""

import random
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, Index, ParisKVCache, RetrievalCache, TokenBlock, attach
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret.methods.paris import ParisIndex
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import held_tokens

from .driver import ERROR, Driver

CPU = torch.device("cpu")
WINDOW = {"sink": 2, "recent": 5, "flush": 4, "dense_below": 0}
SIZES: dict[str, Any] = {"top_k": 1.0, "max_draft": 4, **WINDOW}


def _check_attention(driver: Driver, out: torch.Tensor) -> None:
    """Full attention where the query is a token; padding asks for nothing."""
    error = (out - driver.exact()).abs().amax(dim=(1, 3))[driver.mask[:, -out.shape[2] :]]
    assert not error.isnan().any() and (error < ERROR).all(), f"{error.max():.1e}"


def _check_tokens(driver: Driver) -> None:
    """The layer holds the tokens given, each in its slot."""
    length = driver.mask.shape[1]
    assert driver.cache.get_seq_length() == length
    if length:
        assert all(map(torch.equal, held_tokens(driver.kv), (driver.keys, driver.values)))


@pytest.mark.factor("seed", range(2))
@pytest.mark.factor("kind", [FlatKVCache, ParisKVCache])
@pytest.mark.factor("sinks", [0, 2])
def test_any_history_attends_as_if_dense(kind: type[RetrievalCache], seed: int, sinks: int) -> None:
    choose = random.Random(seed)
    store = choose.choice(["device", "host"])

    def new() -> Driver:
        capped = {"softcap": 4.0, "sinks": True} if seed == 0 else {}
        return Driver(kind, **capped, **SIZES | {"sink": sinks, "store": store})

    pool = [new()]
    cold = 0
    for _ in range(60):
        place = choose.randrange(len(pool))
        driver = pool[place]
        length = driver.mask.shape[1]
        act = choose.choice(["step"] * 6 + ["draft"] * 3 + ["prompt", "crop", "reorder", "fork"])
        if act in ("step", "draft", "prompt"):
            count = choose.randint(*{"step": (1, 1), "draft": (2, 4), "prompt": (5, 30)}[act])
            padded = choose.randrange(count) if choose.random() < 0.6 else 0
            _check_attention(driver, driver.forward(count, padded))
            if act == "draft":
                driver.crop(choose.randint(0, count - 1))
        elif act == "crop":
            driver.crop(choose.randint(0, min(length, 25)))
        elif act == "reorder" and length:
            rows = range(len(driver.mask))
            driver.reorder([choose.choice(rows) for _ in range(choose.randint(1, 3))])
        elif act == "fork" and len(pool) == 3:
            pool.pop(place)
        elif act == "fork" and choose.random() < 0.5:
            pool.append(driver.fork())
        elif act == "fork" and length:
            loaded = new()
            loaded.layer.load_state_dict(driver.layer.state_dict(), CPU)
            driver.cache = loaded.cache
        for each in pool:
            _check_tokens(each)
        cold = max(cold, *(each.layer.cold_len for each in pool))
    assert cold > 20, "this history never made tokens cold"


def _kv(config: FlatConfig, index: Index | None = None, batch: int = 1) -> LayerKV:
    like = torch.empty(batch, 1, 0, 2), torch.empty(batch, 1, 0, 2)
    return LayerKV(config, index or FlatIndex(), lambda _: PagedStore(DeviceMemory(CPU)), *like)


def _tokens(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 1, count, 2)


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
        self.valid: list[list[bool]] = []

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
        assert valid is not None and queries.shape[2] == keys.shape[2]
        self.valid += valid.tolist()
        self.calls.append(("on_forward", start, start + queries.shape[2]))

    def build(self, cold: ColdTokens) -> None:
        self.calls.append(("build", 0, len(cold)))

    def before_search(self, cold: ColdTokens) -> None:
        self.calls.append(("before_search", 0, len(cold)))


def test_an_index_hears_of_every_token_once_and_is_built_once() -> None:
    """It sees which of the new tokens are padding."""
    index = Recorder()
    kv = _kv(FlatConfig(**SIZES), index)
    valid = torch.ones(1, 28, dtype=torch.bool)
    valid[0, 24] = False
    for first, last in ((0, 20), (20, 28)):
        count = last - first
        kv.on_forward(_tokens(count), _tokens(count), valid[:, :last])
        kv.take_prompt(_tokens(count), _tokens(count), valid[:, :last])
    assert index.valid == [valid[0, :20].tolist(), valid[0, 20:].tolist()]
    _ready(kv)
    _ready(kv)
    for _ in range(5):
        kv.take_step(_tokens(1), _tokens(1), None)
    _ready(kv)
    assert index.calls == [
        *(("on_forward", 0, 20), ("add", 0, 15)),
        *(("on_forward", 20, 28), ("add", 15, 20), ("add", 20, 23)),
        *(("build", 0, 23), ("before_search", 0, 23)),
        *(("add", 23, 27), ("before_search", 0, 27)),
    ]


@torch.no_grad()
def test_an_index_is_shown_the_newest_queries(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither steps nor drafts, nor the pass that verifies these."""
    shown: list[tuple[int, list[bool]]] = []

    def note(index: ParisIndex, queries: torch.Tensor, valid: torch.Tensor) -> None:
        shown.append((queries.shape[2], valid[0].tolist()))

    monkeypatch.setattr(ParisIndex, "on_prompt", note)
    attach(llama)
    cache, mask = ParisKVCache(llama.config, **SIZES), torch.ones(1, 110, dtype=torch.bool)
    mask[0, [3, 9, 72]] = False
    for first, last in ((0, 70), (70, 78), (78, 83), (83, 84), (84, 88)):
        tokens = torch.arange(first, last)[None] % llama.config.vocab_size
        llama(tokens, past_key_values=cache, attention_mask=mask[:, :last])
    newest = (64, mask[0, 6:70].tolist()), (8, mask[0, 70:78].tolist())
    assert shown == [each for each in newest for _ in range(len(shown) // 2)] != []


def test_an_index_is_built_again_after_a_crop_to_nothing() -> None:
    index = Recorder()
    kv = _kv(FlatConfig(**SIZES), index)
    for _ in range(2):
        kv.take_prompt(_tokens(20), _tokens(20), None)
        _ready(kv)
        kv.crop(0)
    assert [call for call, *_ in index.calls].count("build") == 2
