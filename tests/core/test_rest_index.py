"""Estimates of what is not selected: the weight that they give it, samples by them, lost mass."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_kvret import (
    A2ATSCache,
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.calibration.corpus import Corpus
from hf_kvret.calibration.runner import calibrate
from hf_kvret.core.call import AttentionCall
from hf_kvret.core.estimates import exact_left_out, left_out_logits
from hf_kvret.core.index import ColdTokens, Estimates, Index
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.sampling import priority_sample, uniforms
from hf_kvret.core.scoring import Scoring
from hf_kvret.core.store import weighted_attention
from hf_kvret.core.unselected import LayerOfModel, Lost
from hf_kvret.integration.compatibility import AttentionShape
from hf_kvret.methods.a2ats.calibrator import A2ATSCalibration
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k

from .test_rest import CONFIG, ERROR, Driver, on

ALL = 10**6
METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {"schedule": ((math.inf, 1.0, 0.5),)}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, each head": (LRQKCache, {"rank": 8, "shared": False}),
    "a2ats": (A2ATSCache, {}),
}
RESTS = ("index", "sample")


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


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_that_covers_all_is_full_attention(method: str, rest: str, artifact: str) -> None:
    plain = lived(begun(method, artifact, top_k=ALL))
    driver = begun(method, artifact, top_k=ALL, rest=rest)
    for own, expected in zip(lived(driver), plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=ERROR)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] == pytest.approx(0.0, abs=1e-6)


class Watched:
    """A driver that remembers what its index was asked in the last pass."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.query = torch.empty(0)
        self.cold: ColdTokens | None = None

    def forward(self, count: int, padded: int = 0) -> torch.Tensor:
        regions = self.driver.layer.regions
        index = None if regions is None else regions.index
        with pytest.MonkeyPatch.context() as patch:
            if index is not None:
                search = index.search

                def watch(query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
                    self.query, self.cold = query, cold
                    return search(query, cold)

                patch.setattr(index, "search", watch)
            with on("torch"):
                return self.driver.forward(count, padded)

    @property
    def index(self) -> Index:
        regions = self.driver.layer.regions
        assert regions is not None and regions.index is not None
        return regions.index

    def asked(self) -> tuple[torch.Tensor, ColdTokens]:
        assert self.cold is not None, "the last pass searched"
        return self.query, self.cold


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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_rest_weighs_as_much_as_its_estimates_say(softcap: float | None) -> None:
    """With exact estimates the softmax's denominator is that of full attention."""
    watched = Watched(Driver(softcap=softcap, rest="index"))
    watched.forward(90, padded=11)
    for count in (1, 3):
        out = watched.forward(count)
        query, cold = watched.asked()
        driver, ids = watched.driver, watched.driver.ids
        assert ids is not None
        left = exact_left_out(query, ids, cold)
        # The driver's reference gives rest tokens the logit log(n - k) + score of the mean.
        regions = driver.layer.regions
        assert regions is not None
        means = regions.rest_sums(cold).means()
        plain = Estimates(torch.full((*query.shape[:3], len(cold)), float("-inf")))
        known, none_known = left_out_logits(query, plain, ids, cold, means)
        assert (known == float("-inf")).all()
        expected = driver.expected()
        # exp(left) in place of exp(none_known), worked out from the two softmaxes.
        near_lse, mean_value = _near(watched, ids), means.values.repeat_interleave(3, 1)
        mean_share = (none_known - torch.logaddexp(near_lse, none_known)).exp().unsqueeze(-1)
        near_out = (expected - mean_share * mean_value) / (1 - mean_share)
        share = (left - torch.logaddexp(near_lse, left)).exp().unsqueeze(-1)
        wanted = near_out * (1 - share) + share * mean_value
        torch.testing.assert_close(out.double(), wanted.double(), rtol=1e-4, atol=1e-4)


def _near(watched: Watched, ids: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp of what the last pass attended to exactly."""
    query, cold = watched.asked()
    regions = watched.driver.layer.regions
    assert regions is not None
    _, selected = cold.store.attend(query, ids, cold.scale, cold.softcap)
    keys, _ = regions.window.tokens()
    scores = exact_scores(query, keys, cold.scale, cold.softcap)
    new, sinks = query.shape[2], regions.window.sink
    recent = watched.driver.mask[:, None, None, -(keys.shape[2] - sinks) :].expand(-1, 1, new, -1)
    causal = torch.ones(new, recent.shape[-1], dtype=torch.bool).tril(recent.shape[-1] - new)
    full = torch.ones(*recent.shape[:3], sinks, dtype=torch.bool)
    seen = torch.cat([full, recent & causal], dim=-1)
    return torch.logaddexp(selected, scores.masked_fill(~seen, float("-inf")).logsumexp(-1))


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


@pytest.mark.parametrize("rest", RESTS)
def test_tokens_without_estimates_weigh_as_their_mean(rest: str) -> None:
    watched = Watched(Driver(SomeKVCache, rest=rest))
    watched.forward(90, padded=11)
    watched.forward(3)
    query, cold = watched.asked()
    ids, n = watched.driver.ids, len(cold)
    regions = watched.driver.layer.regions
    assert ids is not None and regions is not None
    means = regions.rest_sums(cold).means()
    estimates = watched.index.estimate(query, cold)
    assert estimates is not None and estimates.ids is not None
    if rest == "sample":
        # Nothing else can be drawn.
        assert bool(((ids % 2 == 0) | (ids == -1)).all())
    result = torch.logaddexp(*left_out_logits(query, estimates, ids, cold, means))
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


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("rest", [None, "mean", "left_out", *RESTS])
def test_lost_mass_of_exact_estimates_is_the_exact_one(rest: str | None, size: int | None) -> None:
    driver = Driver(
        rest=rest, select_heads=size, warn_lost_mass=0.99, track_recall=True, sinks=True
    )
    driver.forward(90, padded=11)
    for count in (1, 1, 3):
        driver.forward(count)
    (stats,) = driver.cache.stats()["layers"]
    assert 0.05 < stats["lost_mass"] < 0.95
    assert stats["lost_mass"] == pytest.approx(stats["exact_lost_mass"], abs=1e-5)
    # Without a stand-in both are of the same softmax: with one, the same share of it.
    plain = Driver(select_heads=size, track_recall=True, sinks=True)
    plain.forward(90, padded=11)
    for count in (1, 1, 3):
        plain.forward(count)
    (expected,) = plain.cache.stats()["layers"]
    if rest != "sample":
        assert stats["lost_mass"] == pytest.approx(expected["exact_lost_mass"], abs=1e-5)


def test_lost_mass_is_none_where_nothing_measures_it() -> None:
    for options in ({}, {"rest": "mean"}, {"rest": "left_out"}):
        driver = Driver(**options)
        driver.forward(90)
        driver.forward(1)
        (stats,) = driver.cache.stats()["layers"]
        assert stats["lost_mass"] is None and "exact_lost_mass" not in stats
    driver = Driver(CTkvrCache, track_recall=True)
    driver.forward(90)
    driver.forward(1)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] is None and stats["recall_mass"] > 0.0


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


def test_a_warning_comes_once_at_a_flush_or_with_the_stats() -> None:
    driver = Driver(warn_lost_mass=0.05)
    driver.forward(90)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.forward(1)
    with pytest.warns(UserWarning, match="layer 0 leaves out .*warn_lost_mass=0.05.*top_k=12"):
        for _ in range(5):
            driver.forward(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.cache.stats()
    fork = driver.cache.fork(rest="index")
    driver.cache = fork
    driver.forward(1)
    with pytest.warns(UserWarning, match="raise top_k=12$"):
        fork.stats()
    quiet = Driver(warn_lost_mass=0.98)
    quiet.forward(90)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            quiet.forward(1)
        quiet.cache.stats()


def test_saved_loaded_and_forked_options(tmp_path: Any) -> None:
    driver = Driver()
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    caches = [
        driver.cache.fork(rest="index", warn_lost_mass=0.9),
        FlatKVCache.from_pretrained(tmp_path, CONFIG, rest="index", warn_lost_mass=0.9),
    ]
    mask, state, outs = driver.mask, driver.generator.get_state(), []
    for cache in caches:
        driver.cache, driver.mask = cache, mask
        driver.generator.set_state(state)
        outs.append(driver.forward(1))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_factors_are_those_of_the_querys_own_heads(count: int, size: int | None) -> None:
    factors = torch.linspace(-1.0, 1.0, 6)
    driver = Driver(rest="index", select_heads=size, flush=64)
    driver.forward(90)
    results, outs, shares = [], [], Lost.shares
    for learned in (factors, None):
        driver.layer.of_model = LayerOfModel(0, AttentionShape(6, 2, 32), learned)
        driver.generator.manual_seed(5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Lost, "shares", lambda lost, lse: (results.append(lost), shares(lost, lse))[1]
            )
            outs.append(driver.forward(count))
        driver.cache.crop(-count)
        driver.mask = driver.mask[:, :-count]
    corrected, plain = results
    # What is lost is not what stands for it.
    torch.testing.assert_close(corrected.estimated, plain.estimated, rtol=0.0, atol=1e-5)
    assert corrected.stand_in is not None and plain.stand_in is not None
    shifts = corrected.stand_in - plain.stand_in
    torch.testing.assert_close(shifts, factors.view(1, -1, 1).expand_as(shifts), rtol=0, atol=1e-4)
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


def test_the_heads_of_a_process_take_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 KV heads with two query heads each, the second of four processes has 2."""
    factors = torch.arange(16.0)
    layer = LayerOfModel(0, AttentionShape(16, 8, 32), factors)
    assert torch.equal(layer.factors(8, 16, factors.device), factors)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    assert layer.first_head(2) == 2
    assert layer.factors(2, 4, factors.device).tolist() == [4, 5, 6, 7]  # type: ignore[union-attr]


class BlindKVCache(RetrievalCache):
    """Its index knows nothing of the others."""

    name = "blind"
    config_class = FlatConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> Index:
        class Blind(FlatIndex):
            estimate = Index.estimate

        return Blind()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CTkvrCache, {"rest": "index"}, "rest='index': ctkvr .*rest='mean'"),
        (CTkvrCache, {"rest": "sample"}, "rest='sample': ctkvr"),
        (CTkvrCache, {"warn_lost_mass": 0.3}, "warn_lost_mass=0.3: ctkvr .*leave it out"),
        (H2OCache, {"rest": "index", "top_k": 12}, "h2o has dropped"),
        (AquaKVCache, {"rest": "index"}, "nothing is left out"),
        (LRQKCache, {"rest": "index", "factors": "als"}, "factors='als'"),
        (BlindKVCache, {"rest": "index"}, "its index has no method estimate"),
        (FlatKVCache, {"rest": "index", "rest_blocks": 64}, "only rest='mean'"),
        (FlatKVCache, {"rest": "mean", "rest_artifact": "there"}, "rest='index'"),
        (FlatKVCache, {"warn_lost_mass": 1.0}, "above 0 and below 1"),
    ],
)
def test_bad_options_say_what_to_do(
    kind: type[RetrievalCache], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Driver(kind, **options)
