"""Estimates of what is not selected, and the missed mass that they make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_kvret import (
    A2ATSCache,
    FlatKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.contracts.index import ColdTokens, Estimates
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.observe.missed_mass import missed_logits
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k

from .test_block_sums import CONFIG, ERROR, Driver
from .watched import Watched

ALL = 10**6
METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {"schedule": ((math.inf, 1.0, 0.5),)}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, each head": (LRQKCache, {"rank": 8, "shared": False}),
    "a2ats": (A2ATSCache, {}),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: Any) -> str:
    """A codebook of keys after RoPE: the driver knows no positions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("a2ats")
    options = A2ATSCalibration(codewords=32, rounds=5, compare=False, space="rotated")
    corpus = Corpus([torch.randint(3, 99, (200,)) for _ in range(3)], 0, {"text": "random"})
    calibrate(LlamaForCausalLM(CONFIG).eval(), corpus, options, folder, progress=False)
    return str(folder)


def begun(method: str, artifact: str, **options: Any) -> Driver:
    kind, own = METHODS[method]
    if kind is A2ATSCache:
        own = {**own, "artifact": artifact}
    return Driver(kind, **own, **options)


def lived(driver: Driver) -> list[torch.Tensor]:
    """Attention of steps and drafts, with all that may happen to a cache in between."""
    driver.forward(90, padded=11)
    outs = [driver.forward(count) for count in (1, 1, 3)]
    driver.cache.crop(-3)
    driver.mask = driver.mask[:, :-3]
    outs.append(driver.forward(2))
    driver.cache.reorder_cache(torch.tensor([1, 0]))
    driver.mask = driver.mask[[1, 0]]
    outs += [driver.forward(1) for _ in range(5)]
    driver.cache.crop(-40)
    driver.mask = driver.mask[:, :-40]
    outs += [driver.forward(1) for _ in range(5)]
    driver.cache = driver.cache.fork()
    return [*outs, driver.forward(1), driver.forward(4)]


@pytest.mark.parametrize("method", METHODS)
def test_measuring_changes_no_attention_and_a_budget_of_all_misses_nothing(
    method: str, artifact: str
) -> None:
    plain = lived(begun(method, artifact, top_k=ALL))
    driver = begun(method, artifact, top_k=ALL, track_recall=True)
    for own, expected in zip(lived(driver), plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=ERROR)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("method", METHODS)
def test_estimates_are_what_the_search_goes_by(
    method: str, softcap: float | None, artifact: str
) -> None:
    watched = Watched(begun(method, artifact, softcap=softcap))
    watched.forward(90, padded=11)
    for count in (1, 3):
        watched.forward(count)
        query, cold = watched.asked()
        found = watched.index.search(query, cold)
        estimates = watched.index.estimate(query, cold)
        assert estimates is not None and estimates.ids is None
        logits = estimates.logits
        assert logits.dtype == torch.float32
        assert logits.shape == (*query.shape[:3], len(cold))
        logits = logits.masked_fill(~cold.valid[:, None, None], float("-inf"))
        relevance = group_relevance(logits, found.shape[1])
        best = top_k(relevance, cold.budget)
        # Relevance, not ids: of tokens that matter alike any may be taken.
        values = [relevance.gather(-1, ids.long()).sort(-1).values for ids in (found, best)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["flat", "paris", "lrqk", "lrqk, each head"])
def test_estimates_are_near_the_scores_and_on_their_scale(method: str, artifact: str) -> None:
    watched = Watched(begun(method, artifact))
    watched.forward(300)
    watched.forward(1)
    query, cold = watched.asked()
    estimates = watched.index.estimate(query, cold)
    assert estimates is not None
    keys = torch.cat([keys for _, keys in cold.store.key_chunks()], dim=2)
    exact = exact_scores(query, keys, cold.scale)
    # As logits of one softmax: of random keys few numbers tell little, so a loose bound; the mean
    # over tokens is right only with the part of the mean key.
    error = (estimates.logits - exact).square().mean() / exact.var(-1).mean()
    assert error < {"flat": 1e-10, "paris": 0.05}.get(method, 0.7)
    means = (estimates.logits.mean(-1) - exact.mean(-1)).abs().mean()
    assert means < 0.25 * exact.std(-1).mean()


class SomeIndex(FlatIndex):
    """Knows the logits of every other token only, in an order of its own."""

    def estimate(self, query: torch.Tensor, cold: ColdTokens) -> Estimates:
        logits = super().estimate(query, cold).logits
        places = torch.arange(0, len(cold), 2).flip(0)
        heads = self._keys.rows.shape[1]
        ids = places.int().expand(len(query), heads, query.shape[2], -1).clone()
        ids[..., 0], known = -1, logits[..., places].clone()
        known[..., 0] = float("-inf")
        return Estimates(known, ids)


class SomeKVCache(FlatKVCache):
    @classmethod
    def make_index(cls, options: Any, layer: int) -> FlatIndex:
        return SomeIndex()


def test_tokens_without_estimates_weigh_as_their_mean() -> None:
    watched = Watched(Driver(SomeKVCache, rest="mean"))
    watched.forward(90, padded=11)
    watched.forward(3)
    query, cold = watched.asked()
    ids, n = watched.driver.ids, len(cold)
    kv = watched.driver.layer.kv
    assert ids is not None and kv is not None
    means = kv.block_sums(cold).means()
    estimates = watched.index.estimate(query, cold)
    assert estimates is not None and estimates.ids is not None
    result = torch.logaddexp(*missed_logits(query, estimates, ids, cold, means))
    scores = exact_scores(
        query, torch.cat([k for _, k in cold.store.key_chunks()], 2), cold.scale
    ).double()
    mean_scores = exact_scores(query, means.keys, cold.scale)[..., 0].double()
    last_known = int(torch.arange(0, n, 2)[-1])
    for row in range(2):
        for head in range(6):
            for place in range(3):
                chosen = set(ids[row, head // 3, place].tolist())
                free = [
                    slot for slot in range(n) if bool(cold.valid[row, slot]) and slot not in chosen
                ]
                known = [slot for slot in free if slot % 2 == 0 and slot != last_known]
                total = scores[row, head, place, known].exp().sum()
                total += (len(free) - len(known)) * mean_scores[row, head, place].exp()
                assert float(result[row, head, place]) == pytest.approx(
                    float(total.log()), abs=1e-4
                )
