"""The mean that stands for tokens that are not selected, against its definition, in every state."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hf_kvret import AquaKVCache, FlatKVCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer import step as layer_step
from hf_kvret.layer.cold_sums import ColdSums
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.stores.paged import PagedStore
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.mean_tokens import MeanToken

from ..kernels.draws import library_threads
from .driver import CONFIG, ERROR, GROUP, HEADS, METHODS, SCALE, Driver, step_by_step

STORES = ("device", "host", "cpu", "resident", "higgs")
# Triton's interpreter is slow; its kernels have small tests of their own.
PLACES = ["library", "threads", "torch", pytest.param("triton", marks=pytest.mark.slow)]


def expected(driver: Driver) -> torch.Tensor:
    """The last pass in fp64, from all rows held and the ids that were selected."""
    kv, query = driver.kv, driver.query.double()
    assert driver.ids is not None
    window, cold, new = kv.window, kv.cold_len, driver.query.shape[2]
    coded = [rows.double() for rows in next(iter(kv.store.chunks()))[1:]]
    held = [rows.double() for rows in kv.rows(kv.length)]
    # Sinks are exact, whatever the store does to its rows.
    sinks = [rows[:, :, : window.sink].double() for rows in (window.keys, window.values)]
    keys, values = (
        torch.cat([old, rows[:, :, cold:], first], dim=2).repeat_interleave(GROUP, dim=1)
        for old, rows, first in zip(coded, held, sinks, strict=True)
    )
    free = torch.cat([driver.mask[:, :cold], torch.zeros(2, 1, dtype=torch.bool)], dim=1)
    free = free.scatter(1, window.sink_slots.where(window.sink_slots >= 0, cold), False)
    free = free[:, None, None, :cold]
    ids = driver.ids.repeat_interleave(HEADS * GROUP // driver.ids.shape[1], dim=1).long()
    chosen = torch.zeros(2, HEADS * GROUP, new, cold + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, ids.where(ids >= 0, cold), True)[..., :cold]
    recent = torch.ones(new, kv.length - cold, dtype=torch.bool)
    recent = recent.tril(recent.shape[1] - new) & driver.mask[:, None, None, cold:]
    near = torch.cat([recent, (window.sink_slots >= 0)[:, None, None].expand(2, 1, new, -1)], -1)
    seen = torch.cat([chosen, near.expand(-1, HEADS * GROUP, -1, -1)], dim=-1)
    cap = driver.softcap or 1e6  # which is none
    scores = query @ keys.mT * SCALE
    score, value = scores[..., :cold], values[:, :, :cold]
    # What is left out, were scores a normal distribution cut at the share that is selected.
    total, left = (marks.sum(-1, keepdim=True) for marks in (free, free & ~chosen))
    weights = free / total.double()
    mean = (weights * score).sum(-1, keepdim=True)
    slope = 1 - (mean / cap).tanh() ** 2
    spread = (weights * (score - mean) ** 2).sum(-1, keepdim=True).sqrt() * slope
    normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
    bound = normal.icdf(left / total.double()) - spread
    below = normal.cdf(bound)
    gain = slope - slope * normal.log_prob(bound).exp() / below / spread
    rest = weights @ value + gain * ((weights * (score - mean)) @ value)
    logit = cap * (mean / cap).tanh() + spread**2 / 2 + (total * below).log()
    scores = (cap * (scores / cap).tanh()).masked_fill(~seen, float("-inf"))
    if driver.sink_logits is not None:
        own = driver.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], dim=2)
    weights = torch.cat([scores, logit], dim=-1).softmax(-1)
    return weights[..., :-1] @ values + weights[..., -1:] * rest.masked_fill(left == 0, 0.0)


def check(driver: Driver, out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected(driver), rtol=1e-5, atol=ERROR)


@contextmanager
def on(place: str) -> Iterator[None]:
    """The library does the steps, on one thread or on many, torch, or Triton."""
    if place in ("library", "threads"):
        if host_step.why_not():
            pytest.skip("the library is not compiled")
        # Operations one by one would give the same.
        one_call = patch.object(layer_step, "_attend_by_search", None)
        with one_call, library_threads(16 if place == "threads" else 1):
            yield
        return
    with step_by_step(), prefer("naive" if place == "torch" else "triton"):
        yield


@pytest.mark.parametrize("by", PLACES)
def test_what_is_not_selected_counts_by_its_mean(by: str) -> None:
    """With capped scores, learned sinks, groups of heads, and where nothing is left out, too."""
    with on(by):
        for more in ({}, {"softcap": 2.0, "sinks": True}, {"top_k": 1.0}):
            driver = Driver(**more, rest="mean")
            driver.forward(60, padded=11)
            for count in (1, 3):
                check(driver, driver.forward(count))


# Each method once, with the stores in turn.
@pytest.mark.parametrize(("method", "store"), zip(METHODS, cycle(STORES)))
def test_it_does_with_every_method_and_store(method: str, store: str) -> None:
    kind, options = METHODS[method]
    driver = Driver(kind, store=store, rest="mean", **options)
    for out in driver.life():
        check(driver, out)


def test_equal_scores_count_for_each_token_that_is_left_out() -> None:
    keys, values = torch.linspace(0, 1, 96).view(2, 1, 2, 1, 24).unbind()
    moments = torch.cat([keys, torch.zeros(1, 2, 48, 24)], dim=2)
    mean = MeanToken(moments, values, torch.tensor([[9]]))
    ids = torch.arange(5).expand(1, 8, 1, 5)
    out, lse = mean.attend(torch.ones(1, 8, 1, 24), ids, 0.3, None)
    expected = 4 * (keys.sum(-1) * 0.3).exp().repeat_interleave(4, dim=1)
    torch.testing.assert_close(lse.exp(), expected)
    assert torch.equal(out, values.repeat_interleave(4, dim=1))


def test_values_follow_scores_that_spread_by_hundreds() -> None:
    moments = torch.tensor([0.0, 1.0, 1.0]).view(1, 1, 3, 1)
    mean = MeanToken(moments, torch.zeros(1, 1, 1, 1), torch.tensor([[1000]]))
    ids = torch.arange(30, dtype=torch.int32).view(1, 1, 1, 30)
    out, _ = mean.attend(torch.full((1, 1, 1, 1), 300.0), ids, 1.0, None)
    # The largest that is left has it all: at the quantile of 97%, and an exponential tail below.
    quantile = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.97)).item()
    assert out.item() == pytest.approx(quantile - 1 / (300 - quantile), abs=1e-4)


def test_means_of_many_rows_are_rounded_once() -> None:
    total, dim = 1 << 18, 4
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, total, dim, generator=generator) + 3.0
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    store.append(TokenBlock(keys, -keys, 0))
    cold = ColdTokens(store, Scoring(torch.ones(1, total, dtype=torch.bool), 1.0), 1)
    sums = ColdSums(dim, dim)
    sums.catch_up(cold, 1, 0)
    mean = sums.mean()
    assert mean.counts.tolist() == [[total]]
    both = torch.cov(torch.cat([keys, -keys], dim=-1)[0, 0].double().mT, correction=0)
    # Products are fp32.
    torch.testing.assert_close(mean.moments[0, 0, 1:].double(), both[:, :dim], rtol=1e-5, atol=1e-5)
    for rows, sign in ((mean.moments, 1), (mean.values, -1)):
        # One rounding to fp32; sums of 64 rows are fp32 too.
        exact = sign * keys[0, 0].double().mean(0)
        torch.testing.assert_close(rows[0, 0, 0].double(), exact, rtol=3e-7, atol=0.0)


@pytest.fixture
def driver() -> Driver:
    """A padded prompt and a step, with means."""
    driver = Driver(rest="mean")
    driver.forward(90, padded=11)
    driver.forward(1)
    return driver


def reload(driver: Driver, folder: Path, **options: Any) -> None:
    """Go on with a saved and loaded cache."""
    driver.cache.save_pretrained(folder)
    driver.cache = FlatKVCache.from_pretrained(folder, CONFIG, **options)


def test_a_fork_and_a_load_switch_it_on(tmp_path: Path) -> None:
    driver = Driver()
    driver.forward(90, padded=11)
    driver.forward(1)
    fork = driver.fork(rest="mean")
    reload(driver, tmp_path, rest="mean")
    for each in (fork, driver):
        check(each, each.forward(1))


def test_bad_options_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="choose 'mean' or None"):
        Driver(rest="average")
    with pytest.raises(ValueError, match="nothing is left out"):
        Driver(AquaKVCache, rest="mean")


def test_loaded_sums_are_not_made_of_the_rows_again(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = driver.kv.sums
    reload(driver, tmp_path)
    loaded = driver.kv.sums
    assert loaded.end == saved.end == driver.kv.cold_len > 0
    for name in ("moments", "values", "counts"):
        assert torch.equal(getattr(loaded.mean(), name), getattr(saved.mean(), name))
    monkeypatch.setattr(ColdSums, "add", lambda *_: pytest.fail("rows were added again"))
    check(driver, driver.forward(1))


def test_sums_are_of_what_the_store_reads_back(driver: Driver, tmp_path: Path) -> None:
    """Coded rows are others than those that were summed, so a load sums them again."""
    reload(driver, tmp_path, store="higgs")
    check(driver, driver.forward(1))


@pytest.mark.parametrize("store", ["host", "higgs"])
def test_what_a_crop_drops_is_taken_off(store: str) -> None:
    """And all is forgotten where that is more than what stays, or which is padding is not known."""
    driver = Driver(rest="mean", store=store)
    driver.forward(200, padded=11)
    for dropped in (30, 1, 70):
        driver.forward(1)
        driver.crop(dropped)
        assert driver.kv.sums.end == driver.kv.cold_len > 40
        assert (driver.kv.sums._counts[:, 0] - driver.kv.retrievable(driver.mask).sum(1) == 0).all()
        check(driver, driver.forward(1))
    driver.crop(driver.kv.length - 40)
    assert driver.kv.sums.end == 0 < driver.kv.cold_len
    check(driver, driver.forward(1))
    driver.kv.crop(driver.kv.length - 10)
    assert driver.kv.sums.end == 0 < driver.kv.cold_len


@pytest.mark.parametrize("question", [3, 60])
def test_a_later_mask_takes_tokens_out_of_the_mean(question: int) -> None:
    """As of an answer that ended early, behind which ``generate`` puts padding."""
    driver = Driver(rest="mean")
    driver.forward(90, padded=11)
    for _ in range(40):
        driver.forward(1)
    driver.mask[0, 95:110] = False
    driver.forward(question)
    check(driver, driver.forward(1))
    assert driver.kv.sums.counts_as_many_as(driver.kv.retrievable(driver.mask))
    driver.crop(question + 10)
    check(driver, driver.forward(1))


def test_infinite_sums_are_not_saved_and_other_shapes_are_refused(driver: Driver) -> None:
    state = driver.layer.state_dict()
    state["moments.sums"] = state["moments.sums"][:, :1]
    with pytest.raises(ValueError, match=r"moments\.sums is .* the file is damaged"):
        Driver(rest="mean").layer.load_state_dict(state, torch.device("cpu"))
    driver.kv.sums._products = driver.kv.sums._products / 0.0
    assert not any(name.startswith("moments.") for name in driver.layer.state_dict())
