"""Sums of the rest in a saved cache: they come back, and those that don't fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret.layer.block_sums import BlockSums

from .test_block_sums import CONFIG, Driver


def sums_of(driver: Driver) -> BlockSums:
    kv = driver.layer.kv
    assert kv is not None and kv.sums is not None
    return kv.sums


def test_loaded_sums_are_not_made_of_the_rows_again(tmp_path: Path) -> None:
    driver = Driver(rest="mean")
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    saved = sums_of(driver)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    loaded = sums_of(driver)
    kv = driver.layer.kv
    assert kv is not None and loaded.end == saved.end == kv.cold_len > 0
    for name in ("keys", "values", "counts"):
        assert torch.equal(getattr(loaded.means(), name), getattr(saved.means(), name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockSums, "add", lambda *_: pytest.fail("rows were added again"))
        driver.check(driver.forward(1))


@pytest.mark.parametrize("gone", [20, 60])
def test_sums_that_a_crop_cut_are_saved(tmp_path: Path, gone: int) -> None:
    driver = Driver(rest="mean")
    driver.forward(90)
    driver.cache.crop(-gone)
    driver.mask = driver.mask[:, :-gone]
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    driver.check(driver.forward(1))
    # Loaded, and cropped before any pass.
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    driver.cache.crop(-20)
    driver.mask = driver.mask[:, :-20]
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG)
    driver.check(driver.forward(1))


@pytest.mark.parametrize("before", ["device", "higgs"])
def test_sums_are_of_what_the_store_reads_back(tmp_path: Path, before: str) -> None:
    """Coded rows are others than those that were summed, so a load sums them again."""
    driver = Driver(rest="mean", store=before)
    driver.forward(90, padded=11)
    driver.forward(1)
    driver.cache.save_pretrained(tmp_path)
    driver.cache = FlatKVCache.from_pretrained(tmp_path, CONFIG, store="higgs")
    driver.check(driver.forward(1))


def test_sums_of_infinite_rows_are_not_saved(tmp_path: Path) -> None:
    driver = Driver(rest="mean")
    driver.forward(90)
    sums = sums_of(driver)
    assert sums._sums is not None
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
