"""Samples of what is not selected: their numbers, their weights, and that they repeat."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret.core import sampling
from hf_kvret.core.call import AttentionCall
from hf_kvret.core.sampling import priority_sample, uniforms
from hf_kvret.core.scoring import Scoring
from hf_kvret.core.store import weighted_attention

from .test_rest import Driver
from .watched import Watched


def test_priority_samples_are_unbiased_and_keep_what_is_large() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, n, count = 4000, 60, 12
    log_sizes = torch.randn(1, 1, 1, n, generator=generator) * 2.0
    log_sizes[..., 7] = float("-inf")
    values = torch.randn(n, generator=generator)
    rows = torch.arange(seeds).view(-1, 1, 1, 1)
    draws = uniforms(3, rows, torch.arange(n))
    places, weights = priority_sample(log_sizes.expand(seeds, 1, 1, n), draws, count)
    assert places.shape == weights.shape == (seeds, 1, 1, count)
    assert not (places == 7).any() and (weights >= 0).all()
    assert all(len(set(row.tolist())) == count for row in places[:50, 0, 0])
    for numbers in (values, torch.ones(n), log_sizes[0, 0, 0].exp()):
        sums = (weights.exp() * numbers[places.long()]).sum(-1).flatten().double()
        exact = float(numbers.where(torch.arange(n) != 7, torch.zeros(())).sum())
        error = float(sums.std()) / math.sqrt(seeds)
        assert abs(float(sums.mean()) - exact) < 4 * error + 1e-6
    largest = int(log_sizes.argmax())
    assert (places == largest).any(-1).all()


def test_uniforms_are_uniform_and_never_0_or_1() -> None:
    draws = uniforms(0, torch.arange(200).view(-1, 1), torch.arange(500))
    assert draws.dtype == torch.float32 and 0.0 < float(draws.min()) < float(draws.max()) < 1.0
    counts = torch.histc(draws, 20, 0.0, 1.0)
    # Of 5,000 in a bin, s.d. 69.
    assert float((counts - 5000).abs().max()) < 300
    neighbours = [(draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])]
    for one, other in neighbours:
        pair = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(pair.corrcoef()[0, 1])) < 0.02
    assert not torch.equal(draws, uniforms(1, torch.arange(200).view(-1, 1), torch.arange(500)))


@pytest.mark.parametrize("size", [None, 1])
def test_samples_repeat_in_drafts_forks_and_after_a_crop(size: int | None) -> None:
    def ids_of(counts: tuple[int, ...], fork: bool) -> list[torch.Tensor]:
        driver = Driver(rest="sample", select_heads=size, flush=16)
        driver.forward(90, padded=11)
        if fork:
            driver.forward(3)
            driver.cache.crop(-3)
            driver.mask, driver.cache = driver.mask[:, :-3], driver.cache.fork()
        # Later tokens are drawn one after the other in both.
        driver.generator.manual_seed(1)
        ids = []
        rows = torch.randn(3, 2, 6, 4, 16, generator=driver.generator)
        start = 0
        for count in counts:
            part = rows[:, :, :, start : start + count]
            start += count
            ids += list(_pass(driver, part).split(1 if size is None else 3, dim=2))
        return ids

    apart, drafted, forked = ids_of((1, 1, 1, 1), False), ids_of((4,), False), ids_of((4,), True)
    for one, other, third in zip(apart, drafted, forked, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert not torch.equal(apart[0], apart[1])


def _pass(driver: Driver, rows: torch.Tensor) -> torch.Tensor:
    """The ids of a pass of made-up tokens, ``rows [3, B, Hq, n, D]``."""
    count = rows.shape[3]
    driver.mask = torch.cat([driver.mask, torch.ones(2, count, dtype=torch.bool)], dim=1)
    query, key, value = rows[0], rows[1, :, :2], rows[2, :, :2]
    key, value = driver.cache.update(key.contiguous(), value.contiguous(), 0)
    call = AttentionCall(Scoring(driver.mask, 0.5), lambda: query)
    with driver._watching():
        driver.layer.attend(query, key, value, call)
    assert driver.ids is not None
    return driver.ids


def test_weighted_attention_is_the_definition() -> None:
    watched = Watched(Driver(softcap=3.0))
    watched.forward(90, padded=11)
    watched.forward(3)
    query, cold = watched.asked()
    ids = watched.driver.ids
    assert ids is not None
    ids[0, 0, 1] = -1
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) * 3
    out, lse = weighted_attention(cold.store, query, ids, weights, cold.scale, cold.softcap)
    keys, values = (side.double() for side in cold.store.gather(ids))
    grouped = query.double().unflatten(1, (2, 3)).transpose(2, 3)
    logits = 3.0 * torch.tanh(grouped @ keys.mT * cold.scale / 3.0) + weights.unsqueeze(3)
    logits = logits.masked_fill(ids.unsqueeze(3) < 0, float("-inf"))
    expected = (logits.softmax(-1).nan_to_num() @ values).transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    sums = logits.logsumexp(-1).transpose(2, 3).flatten(1, 2)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    assert (lse[0, :3, 1] == float("-inf")).all() and (out[0, :3, 1] == 0).all()


@pytest.mark.parametrize("state", [0, 2**32 - 1])
def test_the_ends_of_the_hash_are_inside(state: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_mixed", lambda each: torch.full_like(each, state))
    assert 0.0 < float(uniforms(0, torch.arange(1))) < 1.0
