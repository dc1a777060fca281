"""Missed mass: against the exact one, its warning, and where there are no estimates."""

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
from hf_kvret.contracts.index import ColdTokens, Index
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret.observe.counters import subscriber
from hf_kvret.observe.missed_mass import MEASURED_STEPS, MissedMass

from .test_block_sums import CONFIG, GROUP, HEADS, Driver


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("rest", [None, "mean"])
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
    assert stats["lost_mass"] == pytest.approx(expected["exact_lost_mass"], abs=1e-5)


def test_lost_mass_is_none_where_nothing_measures_it() -> None:
    for options in ({}, {"rest": "mean"}):
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
    with pytest.warns(UserWarning, match="layer 0 leaves out .*warn_lost_mass=0.05.*top_k=12"):
        driver.forward(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.cache.stats()
    fork = driver.cache.fork(rest="mean")
    driver.cache = fork
    with pytest.warns(UserWarning, match="raise top_k=12$"):
        driver.forward(1)
    quiet = Driver(warn_lost_mass=0.98)
    quiet.forward(90)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            quiet.forward(1)
        quiet.cache.stats()


def shares_measured(driver: Driver) -> int:
    (layer,) = driver.cache.retrieval_layers
    missed = subscriber(layer, MissedMass)
    assert missed is not None and missed.measured is not None
    return int(missed.measured[1])


def test_for_a_warning_one_step_in_sixteen_is_measured() -> None:
    driver = Driver(warn_lost_mass=0.98, flush=64)
    driver.forward(90)
    for _ in range(2 * MEASURED_STEPS + 1):
        driver.forward(1)
    # Shares of all query heads, in three steps of a batch of two.
    assert shares_measured(driver) == 3 * 2 * HEADS * GROUP
    # With recall all of them.
    driver = Driver(warn_lost_mass=0.98, track_recall=True, flush=64)
    driver.forward(90)
    for _ in range(3):
        driver.forward(1)
    assert shares_measured(driver) == 3 * 2 * HEADS * GROUP


def test_a_warning_comes_again_after_a_reset() -> None:
    driver = Driver(warn_lost_mass=0.05, flush=64)
    for _ in range(2):
        driver.mask = driver.mask[:, :0]
        driver.forward(90)
        with pytest.warns(UserWarning, match=r"1 of 1 layers leave out more than.*rest='mean'"):
            driver.forward(1)
        driver.cache.reset()


def test_an_index_may_have_no_estimates_this_time() -> None:
    driver = Driver(SilentKVCache, track_recall=True)
    driver.forward(90)
    driver.forward(1)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] is None and stats["recall_mass"] > 0.0


def test_a_fork_refuses_what_its_index_can_not_estimate() -> None:
    driver = Driver(BlindKVCache)
    driver.forward(90)
    with pytest.raises(ValueError, match="has no method estimate"):
        driver.cache.fork(warn_lost_mass=0.3)


def test_saved_loaded_and_forked_options(tmp_path: Any) -> None:
    driver = Driver()
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    caches = [
        driver.cache.fork(rest="mean", warn_lost_mass=0.9),
        FlatKVCache.from_pretrained(tmp_path, CONFIG, rest="mean", warn_lost_mass=0.9),
    ]
    mask, state, outs = driver.mask, driver.generator.get_state(), []
    for cache in caches:
        driver.cache, driver.mask = cache, mask
        driver.generator.set_state(state)
        outs.append(driver.forward(1))
    assert torch.equal(outs[0], outs[1])


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
    Config = FlatConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> Index:
        class Blind(FlatIndex):
            estimate = Index.estimate

        return Blind()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (CTkvrCache, {"warn_lost_mass": 0.3}, "warn_lost_mass=0.3: ctkvr .*leave it out"),
        (H2OCache, {"warn_lost_mass": 0.3, "top_k": 12}, "h2o has dropped"),
        (AquaKVCache, {"warn_lost_mass": 0.3}, "nothing is left out"),
        (LRQKCache, {"warn_lost_mass": 0.3, "factors": "als"}, "factors='als'"),
        (BlindKVCache, {"warn_lost_mass": 0.3}, "its index has no method estimate"),
        (FlatKVCache, {"warn_lost_mass": 1.0}, "above 0 and below 1"),
    ],
)
def test_bad_options_say_what_to_do(
    kind: type[RetrievalCache], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Driver(kind, **options)
