"""What stands for tokens that are not selected, against its definition, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import AquaKVCache, FlatKVCache, RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer.block_sums import BlockSums
from hf_kvret.methods.latent import LatentConfig
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.stores.paged import PagedStore
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import prefer

from .driver import CONFIG, ERROR, GROUP, HEADS, METHODS, SCALE, Driver, step_by_step

STORES = ("device", "host", "cpu", "resident", "higgs")
# Triton's interpreter is slow; its kernels have small tests of their own.
PLACES = ["library", "torch", pytest.param("triton", marks=pytest.mark.slow)]


def expected(driver: Driver, blocks: int | None = None) -> torch.Tensor:
    """The last pass in fp64, from all rows held and the ids that were selected."""
    kv = driver.kv
    assert driver.ids is not None
    window, cold, new = kv.window, kv.cold_len, driver.query.shape[2]
    query = driver.query.double()
    coded = [rows.double() for rows in next(iter(kv.store.chunks()))[1:]]
    held = [rows.double() for rows in kv.rows(kv.length)]
    # Sinks are exact, whatever the store does to its rows.
    sinks = [rows[:, :, : window.sink].double() for rows in (window.keys, window.values)]
    tokens = [
        torch.cat([old, all_rows[:, :, cold:], first], dim=2)
        for old, all_rows, first in zip(coded, held, sinks, strict=True)
    ]
    free = torch.cat([driver.mask[:, :cold], torch.zeros(2, 1, dtype=torch.bool)], dim=1)
    free = free.scatter(1, window.sink_slots.where(window.sink_slots >= 0, cold), False)
    free = free[:, None, None, :cold].expand(2, HEADS * GROUP, new, cold)
    chosen = torch.zeros(*free.shape[:3], cold + 1, dtype=torch.bool)
    ids = driver.ids.repeat_interleave(HEADS * GROUP // driver.ids.shape[1], dim=1).long()
    chosen = chosen.scatter(-1, ids.where(ids >= 0, cold), True)[..., :cold]
    recent = torch.ones(new, kv.length - cold, dtype=torch.bool)
    recent = recent.tril(recent.shape[1] - new) & driver.mask[:, None, None, cold:]
    near = torch.cat([recent, (window.sink_slots >= 0)[:, None, None].expand(2, 1, new, -1)], -1)
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
    scores = (torch.cat(keys, dim=3) @ query.unsqueeze(-1)).squeeze(-1) * SCALE
    if driver.softcap is not None:
        scores = driver.softcap * torch.tanh(scores / driver.softcap)
    scores = scores + torch.cat(logs, dim=-1)
    if driver.sink_logits is not None:
        own = driver.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
        values.append(torch.zeros_like(values[0][..., :1, :]))
    return (scores.softmax(-1).unsqueeze(-2) @ torch.cat(values, dim=3)).squeeze(-2)


def check(driver: Driver, out: torch.Tensor, blocks: int | None = None) -> None:
    torch.testing.assert_close(out.double(), expected(driver, blocks), rtol=1e-5, atol=ERROR)


@contextmanager
def on(place: str) -> Iterator[None]:
    """``"library"``, ``"torch"`` or ``"triton"`` does the steps."""
    if place == "library":
        if host_step.why_not():
            pytest.skip("the library is not compiled")
        yield
        return
    with step_by_step(), prefer("naive" if place == "torch" else "triton"):
        yield


@pytest.mark.parametrize("blocks", [None, 24])
@pytest.mark.parametrize("by", PLACES)
def test_what_is_not_selected_counts_by_its_mean(by: str, blocks: int | None) -> None:
    """With capped scores, learned sinks and groups of heads, too."""
    with on(by):
        for more in ({}, {"softcap": 2.0, "sinks": True}):
            driver = Driver(**more, rest="mean", rest_blocks=blocks)
            driver.forward(60, padded=11)
            for count in (1, 3):
                check(driver, driver.forward(count), blocks)


@pytest.mark.factor("blocks", [None, 24])
@pytest.mark.factor("by", ["library", "torch"])
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", METHODS)
def test_it_does_with_every_method_and_store(
    method: str, store: str, by: str, blocks: int | None
) -> None:
    kind, options = METHODS[method]
    with on(by):
        driver = Driver(kind, store=store, rest="mean", rest_blocks=blocks, **options)
        for out in driver.life():
            check(driver, out, blocks)


@pytest.mark.parametrize("by", PLACES)
@pytest.mark.parametrize("blocks", [None, 24])
def test_nothing_changes_where_nothing_is_left_out(by: str, blocks: int | None) -> None:
    outs = []
    for options in ({}, {"rest": "mean", "rest_blocks": blocks}):
        with on(by):
            driver = Driver(top_k=10**6, **options)
            driver.forward(90, padded=11)
            outs.append([driver.forward(count) for count in (1, 1, 3, 1)])
    for plain, rested in zip(*outs, strict=True):
        # Operations add in another order than the one call of the library.
        torch.testing.assert_close(plain, rested, rtol=1e-5, atol=ERROR)


def test_a_fork_and_a_load_switch_it_on(tmp_path: Path) -> None:
    driver = Driver()
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    fork = driver.cache.fork(rest="mean")
    loaded = FlatKVCache.from_pretrained(tmp_path, CONFIG, rest="mean", rest_blocks=24)
    mask = driver.mask
    for cache, blocks in ((fork, None), (loaded, 24)):
        driver.cache, driver.mask = cache, mask
        check(driver, driver.forward(1), blocks)


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


def test_loaded_sums_are_not_made_of_the_rows_again(tmp_path: Path) -> None:
    driver = Driver(rest="mean")
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    saved = driver.kv.sums
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    loaded = driver.kv.sums
    assert loaded.end == saved.end == driver.kv.cold_len > 0
    for name in ("keys", "values", "counts"):
        assert torch.equal(getattr(loaded.means(), name), getattr(saved.means(), name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSums, "add", lambda *_: pytest.fail("rows were added again"))
        check(driver, driver.forward(1))


@pytest.mark.parametrize("gone", [20, 60])
def test_sums_that_a_crop_cut_are_saved(tmp_path: Path, gone: int) -> None:
    driver = Driver(rest="mean")
    driver.forward(90)
    driver.crop(gone)
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    check(driver, driver.forward(1))
    # Loaded, and cropped before any pass.
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    driver.crop(20)
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    check(driver, driver.forward(1))


@pytest.mark.parametrize("before", ["device", "higgs"])
def test_sums_are_of_what_the_store_reads_back(tmp_path: Path, before: str) -> None:
    """Coded rows are others than those that were summed, so a load sums them again."""
    driver = Driver(rest="mean", store=before)
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG, store="higgs")
    check(driver, driver.forward(1))


def test_sums_of_infinite_rows_are_not_saved(tmp_path: Path) -> None:
    driver = Driver(rest="mean")
    driver.forward(90)
    sums = driver.kv.sums
    sums._sums = sums._sums / 0.0
    assert not any(name.startswith("rest.") for name in driver.layer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :1], "sums is"),
        (lambda x: x.float(), "sums is float32"),
    ],
)
def test_sums_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    driver = Driver(rest="mean")
    driver.forward(90, padded=11)
    state = driver.layer.state_dict()
    assert "built" in state
    state["rest.sums"] = change(state["rest.sums"])
    with pytest.raises(ValueError, match=message):
        Driver(rest="mean").layer.load_state_dict(state, torch.device("cpu"))
