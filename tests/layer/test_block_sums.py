"""What stands for tokens that are not selected, against its definition, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hf_kvret import (
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer.block_sums import BlockSums
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.methods.latent import LatentConfig
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.stores.paged import PagedStore
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import prefer

HEADS, GROUP, DIM = 2, 3, 16
SIZES: dict[str, Any] = {
    "sink": 2, "recent": 8, "flush": 4, "max_draft": 4, "top_k": 12, "dense_below": 0
}  # fmt: skip
METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, published": (LRQKCache, {"rank": 8, "factors": "als"}),
    "ctkvr": (CTkvrCache, {}),
    "h2o": (H2OCache, {"top_k": 12}),
}
STORES = ("device", "host", "cpu", "resident", "higgs")
ERROR = 2e-5
CONFIG = LlamaConfig(
    hidden_size=HEADS * GROUP * DIM,
    num_hidden_layers=1,
    num_attention_heads=HEADS * GROUP,
    num_key_value_heads=HEADS,
)
# Triton's interpreter is slow; its kernels have small tests of their own.
PLACES = ["library", "torch", pytest.param("triton", marks=pytest.mark.slow)]


class Driver:
    """Passes made-up tokens through the one layer of a cache, and knows what must come out.

    Attributes:
        mask: ``[B, T]`` bool of all tokens held.
        ids: what the index selected in the last pass; None: it was not asked.
    """

    def __init__(
        self,
        kind: type[RetrievalCache] = FlatKVCache,
        softcap: float | None = None,
        sinks: bool = False,
        **options: Any,
    ) -> None:
        self.cache = kind(CONFIG, **{**SIZES, **options})
        self.softcap = softcap
        self.generator = torch.Generator().manual_seed(0)
        self.sink_logits = torch.randn(HEADS * GROUP, generator=self.generator) if sinks else None
        self.mask = torch.ones(2, 0, dtype=torch.bool)
        self.ids: torch.Tensor | None = None
        self.query = torch.empty(0)

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
        query, key, value = (
            torch.randn(batch, heads, count, DIM, generator=self.generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        # Means that are not 0.
        key, value = key + 0.5, value + 1.0
        scoring = Scoring(None if self.mask.all() else self.mask, 0.5, self.softcap)
        self.ids, self.query = None, query
        key, value = self.cache.update(key, value, 0)
        call = AttentionCall(scoring, lambda: torch.zeros_like(query), self.sink_logits)
        with self._watching():
            return self.layer.attend(query, key, value, call)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        kv = self.layer.kv
        index = None if kv is None else kv.index
        with pytest.MonkeyPatch.context() as patch:
            if index is not None:
                after_search = index.after_search

                def watch(ids: torch.Tensor) -> None:
                    self.ids = ids.clone()
                    after_search(ids)

                patch.setattr(index, "after_search", watch)
                patch.setattr(index, "looks_back", True)
            yield

    def expected(self, blocks: int | None = None) -> torch.Tensor:
        """The last pass in fp64, from all rows held and the ids that were selected."""
        kv = self.layer.kv
        assert kv is not None and self.ids is not None and kv.store is not None
        window, cold, new = kv.window, kv.cold_len, self.query.shape[2]
        query = self.query.double()
        coded = [rows.double() for rows in next(iter(kv.store.chunks()))[1:]]
        held = [rows.double() for rows in kv.rows(kv.length)]
        # Sinks are exact, whatever the store does to its rows.
        sinks = [rows[:, :, : window.sink].double() for rows in (window.keys, window.values)]
        tokens = [
            torch.cat([old, all_rows[:, :, cold:], first], dim=2)
            for old, all_rows, first in zip(coded, held, sinks, strict=True)
        ]
        free = torch.cat([self.mask[:, :cold], torch.zeros(2, 1, dtype=torch.bool)], dim=1)
        free = free.scatter(1, window.sink_slots.where(window.sink_slots >= 0, cold), False)
        free = free[:, None, None, :cold].expand(2, HEADS * GROUP, new, cold)
        chosen = torch.zeros(*free.shape[:3], cold + 1, dtype=torch.bool)
        ids = self.ids.repeat_interleave(HEADS * GROUP // self.ids.shape[1], dim=1).long()
        chosen = chosen.scatter(-1, ids.where(ids >= 0, cold), True)[..., :cold]
        recent = torch.ones(new, kv.length - cold, dtype=torch.bool)
        recent = recent.tril(recent.shape[1] - new) & self.mask[:, None, None, cold:]
        near = torch.cat(
            [recent, (window.sink_slots >= 0)[:, None, None].expand(2, 1, new, -1)], -1
        )
        seen = torch.cat([chosen, near.expand(-1, HEADS * GROUP, -1, -1)], dim=-1)
        keys, values = (side.repeat_interleave(GROUP, dim=1) for side in tokens)
        keys, values = keys.unsqueeze(2), values.unsqueeze(2).expand(-1, -1, new, -1, -1)
        logs = [torch.zeros(seen.shape).double().masked_fill(~seen, float("-inf"))]
        keys = [keys.expand(-1, -1, new, -1, -1)]
        values = [values]
        span = blocks or cold
        for first in range(0, cold, span):
            mine = torch.zeros(cold, dtype=torch.bool)
            mine[first : first + span] = True
            left = free & ~chosen & mine
            of = (free & mine).double()
            weights = (of / of.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-2)
            keys.append(weights @ keys[0][..., :cold, :])
            values.append(weights @ values[0][..., :cold, :])
            logs.append(left.sum(-1, keepdim=True).double().log())
        scores = (torch.cat(keys, dim=3) @ query.unsqueeze(-1)).squeeze(-1) * 0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores + torch.cat(logs, dim=-1)
        if self.sink_logits is not None:
            own = self.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, own], dim=-1)
            values.append(torch.zeros_like(values[0][..., :1, :]))
        return (scores.softmax(-1).unsqueeze(-2) @ torch.cat(values, dim=3)).squeeze(-2)

    def check(self, out: torch.Tensor, **kinds: Any) -> None:
        torch.testing.assert_close(out.double(), self.expected(**kinds), rtol=1e-5, atol=ERROR)


@contextmanager
def on(place: str) -> Iterator[None]:
    """``"library"``, ``"torch"`` or ``"triton"`` does the steps."""
    if place == "library":
        if host_step.why_not():
            pytest.skip("the library is not compiled")
        yield
        return
    with pytest.MonkeyPatch.context() as patch, prefer("naive" if place == "torch" else "triton"):
        patch.setattr(host_step, "why_not", lambda: "switched off by a test")
        yield


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({"rest": "mean"}, {}),
    "blocks": ({"rest": "mean", "rest_blocks": 24}, {"blocks": 24}),
}


def live(driver: Driver, **kinds: Any) -> None:
    """All that may happen to a cache between steps, each step checked."""
    driver.forward(90, padded=11)
    for count in (*[1] * 6, 4):
        driver.check(driver.forward(count), **kinds)
    driver.cache.crop(-3)
    driver.mask = driver.mask[:, :-3]
    driver.check(driver.forward(2), **kinds)
    driver.cache.reorder_cache(torch.tensor([1, 0]))
    driver.mask = driver.mask[[1, 0]]
    driver.check(driver.forward(1), **kinds)
    # Into the cold tokens.
    driver.cache.crop(-40)
    driver.mask = driver.mask[:, :-40]
    for _ in range(6):
        driver.check(driver.forward(1), **kinds)
    fork = driver.cache.fork()
    driver.forward(30)
    driver.check(driver.forward(1), **kinds)
    driver.cache, driver.mask = fork, driver.mask[:, : fork.get_seq_length()]
    for _ in range(3):
        driver.check(driver.forward(1), **kinds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by", PLACES)
def test_the_rest_counts_as_defined(by: str, form: str) -> None:
    options, kinds = FORMS[form]
    with on(by):
        live(Driver(**options), **kinds)


@pytest.mark.factor("form", FORMS)
@pytest.mark.factor("by", ["library", "torch"])
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", METHODS)
def test_every_method_and_store(method: str, store: str, by: str, form: str) -> None:
    kind, more = METHODS[method]
    options, kinds = FORMS[form]
    with on(by):
        live(Driver(kind, store=store, **options, **more), **kinds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by", PLACES)
def test_capped_scores_learned_sinks_and_groups_of_heads(by: str, form: str) -> None:
    options, kinds = FORMS[form]
    with on(by):
        driver = Driver(softcap=2.0, sinks=True, **options)
        driver.forward(60)
        driver.check(driver.forward(1), **kinds)
        driver.check(driver.forward(3), **kinds)


@pytest.mark.parametrize("by", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_changes_where_nothing_is_left_out(by: str, form: str) -> None:
    outs = []
    for options in ({}, FORMS[form][0]):
        with on(by):
            driver = Driver(top_k=10**6, **options)
            driver.forward(90, padded=11)
            outs.append([driver.forward(count) for count in (1, 1, 3, 1)])
    for plain, rested in zip(*outs, strict=True):
        # Operations add in another order than the one call of the library.
        torch.testing.assert_close(plain, rested, rtol=1e-5, atol=ERROR)


def test_switched_on_in_a_fork_and_after_loading(tmp_path: Any) -> None:
    driver = Driver()
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    fork = driver.cache.fork(rest="mean")
    loaded = FlatKVCache.from_pretrained(tmp_path, CONFIG, rest="mean", rest_blocks=24)
    mask = driver.mask
    for cache, kinds in ((fork, {}), (loaded, {"blocks": 24})):
        driver.cache, driver.mask = cache, mask
        driver.check(driver.forward(1), **kinds)


def test_means_of_a_million_rows() -> None:
    total, dim = 1 << 20, 4
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, total, dim, generator=generator) + 3.0
    values = torch.randn(1, 1, total, dim, generator=generator) - 2.0
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    store.append(TokenBlock(keys, values, 0))
    cold = ColdTokens(store, Scoring(torch.ones(1, total, dtype=torch.bool), 1.0), 1)
    sums = BlockSums(None, dim, dim)
    sums.catch_up(cold, 1, 0)
    means = sums.means()
    assert means.counts.tolist() == [[total]]
    for mean, rows in ((means.keys, keys), (means.values, values)):
        # One rounding to fp32; sums of 64 rows are fp32 too.
        torch.testing.assert_close(
            mean[0, 0, 0].double(), rows[0, 0].double().mean(0), rtol=3e-7, atol=0.0
        )


def test_means_follow_their_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 40, 8, generator=generator).unbind()
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    store.append(TokenBlock(keys, values, 0))
    valid = torch.rand(2, 40, generator=generator) < 0.7
    sums = BlockSums(None, 8, 8)
    sums.catch_up(ColdTokens(store, Scoring(valid, 1.0), 1), 3, 0)
    before = sums.means()
    sums.reorder(torch.tensor([1, 0]))
    after = sums.means()
    for name in ("keys", "values", "counts"):
        assert torch.equal(getattr(after, name), getattr(before, name)[[1, 0]])


@pytest.mark.parametrize("count", [1, 3, 20])
def test_layers_that_share_keys_attend_as_the_first_does(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step, a draft and a second prompt: the second call of a pass sees the same past."""
    driver = Driver()
    driver.forward(90)
    attend = driver.layer.attend

    def twice(*args: Any) -> torch.Tensor:
        first = attend(*args)
        torch.testing.assert_close(attend(*args), first)
        return first

    monkeypatch.setattr(driver.layer, "attend", twice)
    driver.forward(count)


def test_a_crop_gives_what_never_having_seen_the_tokens_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, 2, 3, 9000, 8, generator=generator).unbind()
    keys, values = (side[0] for side in rows)
    # What is cropped would drown the others in any running sum.
    keys[:, :, 5000:] *= 1e30
    values[:, :, 8000:] = float("inf")
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    for start in range(0, 9000, 500):
        part = slice(start, start + 500)
        store.append(TokenBlock(keys[:, :, part], values[:, :, part], start))
    valid = torch.rand(2, 9000, generator=generator) < 0.9

    def means(sums: BlockSums, length: int) -> Any:
        store.crop(length)
        cold = ColdTokens(store, Scoring(valid[:, :length], 1.0), 1)
        sums.catch_up(cold, 3, 0)
        return sums.means()

    sums = BlockSums(None, 8, 8)
    means(sums, 9000)
    for length in (7000, 4500, 4096, 40):
        sums.crop(length)
        cropped, fresh = means(sums, length), means(BlockSums(None, 8, 8), length)
        assert torch.equal(cropped.counts, fresh.counts)
        torch.testing.assert_close(cropped.keys, fresh.keys, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(cropped.values, fresh.values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FlatKVCache, {"rest": "average"}, "choose 'mean' or None"),
        (FlatKVCache, {"rest": None, "rest_blocks": 64}, "only rest='mean'"),
        (FlatKVCache, {"rest": "mean", "rest_blocks": 0}, "at least 1"),
        (AquaKVCache, {"rest": "mean"}, "nothing is left out"),
    ],
)
def test_bad_options_say_what_to_do(
    kind: type[RetrievalCache], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Driver(kind, **options)


def test_dense_latents_leave_nothing_out() -> None:
    with pytest.raises(ValueError, match="rest='mean' has no meaning"):
        LatentConfig(rest="mean")
