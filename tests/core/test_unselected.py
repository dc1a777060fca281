"""What is not selected: lost mass and its warning, factors of heads, options."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hf_kvret import (
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LRQKCache,
    RetrievalCache,
)
from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.stand_ins import LayerOfModel
from hf_kvret.core.unselected import MEASURED_STEPS, Lost
from hf_kvret.integration.compatibility import AttentionShape
from hf_kvret.methods.flat import FlatConfig, FlatIndex

from .test_rest import CONFIG, GROUP, HEADS, Driver
from .watched import RESTS


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


def test_for_a_warning_one_step_in_sixteen_is_measured() -> None:
    driver = Driver(warn_lost_mass=0.98, flush=64)
    driver.forward(90)
    for _ in range(2 * MEASURED_STEPS + 1):
        driver.forward(1)
    (layer,) = driver.cache.retrieval_layers
    assert layer.counters.lost is not None
    # Shares of all query heads, in three steps of a batch of two.
    assert layer.counters.lost[1] == 3 * 2 * HEADS * GROUP
    # Estimates for the attention itself are of every step.
    driver = Driver(warn_lost_mass=0.98, rest="index", flush=64)
    driver.forward(90)
    for _ in range(3):
        driver.forward(1)
    (layer,) = driver.cache.retrieval_layers
    assert layer.counters.lost is not None
    assert layer.counters.lost[1] == 3 * 2 * HEADS * GROUP


def test_a_warning_comes_before_the_next_prompt_and_again_after_a_reset() -> None:
    driver = Driver(warn_lost_mass=0.05, flush=64)
    for _ in range(2):
        driver.mask = driver.mask[:, :0]
        driver.forward(90)
        driver.forward(1)
        with pytest.warns(UserWarning, match=r"1 of 1 layers leave out more than.*rest='mean'"):
            driver.forward(5)
        driver.cache.reset()


def test_an_index_may_have_no_estimates_this_time() -> None:
    driver = Driver(SilentKVCache, track_recall=True)
    driver.forward(90)
    driver.forward(1)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] is None and stats["recall_mass"] > 0.0


@pytest.mark.parametrize("options", [{"rest": "index"}, {"warn_lost_mass": 0.3}])
def test_a_fork_refuses_what_its_index_can_not_estimate(options: dict[str, Any]) -> None:
    driver = Driver(BlindKVCache)
    driver.forward(90)
    with pytest.raises(ValueError, match="has no method estimate"):
        driver.cache.fork(**options)


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


class SilentKVCache(FlatKVCache):
    """Its index could estimate, and does not."""

    name = "silent"

    @classmethod
    def make_index(cls, options: Any, layer: int) -> FlatIndex:
        class Silent(FlatIndex):
            def estimate(self, query: torch.Tensor, cold: ColdTokens) -> None:
                return None

        return Silent()


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
