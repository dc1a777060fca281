"""A cache that gives other answers than full attention is not measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

from hf_kvret import A2ATSCache, FlatKVCache, NativeKVCache
from hf_kvret.lab.bench.checks import Checker, covering
from hf_kvret.lab.bench.filling import (
    choose_fill,
    feed,
    fill_randomly,
    measure_rows,
    random_tokens,
    serving,
)
from hf_kvret.lab.bench.opponents import PreallocatedCache, choose_bench_caches
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import CheckFailed
from hf_kvret.lab.report.results import Results
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.testing import INDEXED_MODELS, held_tokens
from hf_kvret.testing.indexed_models import known_indexed

PLACE = {"device": torch.device("cpu"), "dtype": torch.float32}
SMALL = "flat:dense_below=0:recent=64:flush=64"
CACHES = ["full", "dense", "static", "flat", "paris", "paris:store=host"]


def tiny(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(load_shape("tiny").config, dtype, "cpu", seed=0)


def checker(dtype: torch.dtype = torch.float32) -> Checker:
    model = tiny(dtype)
    return Checker(model, measure_rows(model, seed=0), seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_caches_pass_in_every_dtype(dtype: torch.dtype) -> None:
    own_checker = checker(dtype)
    for choice in choose_bench_caches(CACHES, {"store": "device"}, "cpu").values():
        assert own_checker.check(choice, 128, 2, "random").startswith("equal within")


class Forgetful(FlatIndex):
    """Never finds the older half of the tokens."""

    def search(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        ids = super().search(*args, **kwargs)
        return ids.masked_fill(ids < ids.shape[-1] // 2, -1)


class Idle(FlatIndex):
    """Finds nothing."""

    def search(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(super().search(*args, **kwargs), -1)


class Swapped(PreallocatedCache):
    """Hands out values in the wrong order."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values.flip(2)


def use_index(monkeypatch: pytest.MonkeyPatch, index: type[FlatIndex]) -> None:
    monkeypatch.setattr(FlatKVCache, "make_index", classmethod(lambda cls, options, layer: index()))


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.float32, "prefill"), (torch.bfloat16, "random")],
)
def test_an_index_that_loses_tokens_is_refused(
    dtype: torch.dtype, fill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_index(monkeypatch, Forgetful)
    choice = choose_bench_caches(["flat"], {}, "cpu")["flat"]
    with pytest.raises(CheckFailed, match=r"flat: logits differ from full attention by \d"):
        checker(dtype).check(choice, 256, 1, fill)


def test_an_index_that_finds_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_index(monkeypatch, Idle)
    choice = choose_bench_caches(["flat"], {}, "cpu")["flat"]
    with pytest.raises(CheckFailed, match="layers 0, 1 retrieved nothing"):
        checker().check(choice, 256, 1, "prefill")


def test_a_wrong_dense_cache_is_refused() -> None:
    with pytest.raises(CheckFailed, match="mine: logits differ"):
        checker().check(CacheChoice("mine", Swapped), 256, 1, "prefill")


@pytest.mark.parametrize("name", ["quantized:nbits=2", "kvpress:SnapKV"])
def test_caches_that_are_inexact_by_design_need_only_be_finite(name: str) -> None:
    result = checker().check(CacheChoice(name, Swapped), 128, 1, "prefill")
    assert result == "finite; not exact by design"


def test_a_cache_whose_check_fails_has_no_numbers_and_others_go_on(
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    use_index(monkeypatch, Forgetful)
    file = tmp_path / "decode.json"
    arguments = ["--context", "256", "--caches", f"full,{SMALL}", "--json", str(file)]
    arguments += ["--steps", "2", "--warmup", "0"]
    assert bench("decode", *arguments) == 1
    said = capsys.readouterr()
    assert "differ from full attention" in said.err
    assert "check failed: flat" in said.out
    rows = {cell["cache"]: row for cell, row in Results.load(file)}
    assert "seconds" in rows["full"] and "seconds" not in rows[SMALL]
    assert "differ from full attention" in rows[SMALL]["check_failed"]


def test_steps_that_retrieve_nothing_are_not_reported(
    bench: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_index(monkeypatch, Idle)
    monkeypatch.setattr(Checker, "check", lambda *arguments: "passed")
    assert bench("decode", "--context", "256", "--caches", SMALL, "--rounds", "1") == 1
    assert "retrieved nothing" in capsys.readouterr().err


def test_a_store_that_splits_its_rows_splits_those_of_the_check() -> None:
    model = tiny()
    rows = measure_rows(model, seed=0)
    large = FlatKVCache(model.config, store="split", device_budget="60GB")
    cache = covering(large, model, 2, 800)
    with serving(model, cache):
        fill_randomly(model.config, cache, rows, batch=2, context=800, seed=5, **PLACE)
    stores = [layer.kv.store for layer in cache.retrieval_layers]
    for store in stores:
        # A token's row is 1,024 bytes: keys and values of two heads of 64 elements in fp32.
        least = 2 * 100 * 1024
        assert store.nbytes() - store.host_nbytes() >= least and store.host_nbytes() >= least


def test_random_rows_have_positions_for_indexes_that_need_them() -> None:
    model = load_bundled_model()
    cache = A2ATSCache(model.config, dense_below=0, recent=32, flush=32)
    with serving(model, cache):
        fill_randomly(model.config, cache, measure_rows(model, 0), 2, 300, 5, **PLACE)
        feed(model, cache, random_tokens(model, 2, 1, 5), 300)
    assert all(layer.selected > 0 for layer in cache.retrieval_layers)


def test_random_rows_are_the_same_for_every_cache_and_as_large_as_the_models_own() -> None:
    model = tiny()
    rows = measure_rows(model, seed=0)
    plain = DynamicCache(config=model.config)
    fill_randomly(model.config, plain, rows, batch=2, context=300, seed=5, **PLACE)
    for layer, like in zip(plain.layers, rows, strict=True):
        assert layer.keys.shape == (2, 2, 300, 64)
        # 77,000 numbers: their standard deviation is known to half a percent.
        assert float(layer.keys.std()) == pytest.approx(like.key_scale, rel=0.02)
        assert float(layer.values.std()) == pytest.approx(like.value_scale, rel=0.02)
    ours = FlatKVCache(model.config, sink=4, recent=32, flush=32, dense_below=0, store="device")
    with serving(model, ours):
        fill_randomly(model.config, ours, rows, batch=2, context=300, seed=5, **PLACE)
    kv = ours.retrieval_layers[1].kv
    assert kv is not None and (kv.length, kv.cold_len) == (300, 268)
    keys, values = held_tokens(kv)
    assert torch.equal(keys, plain.layers[1].keys)
    assert torch.equal(values, plain.layers[1].values)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "dots3_note"])
def test_random_rows_come_with_keys_of_the_indexer(name: str) -> None:
    if name not in known_indexed():
        pytest.skip("this transformers has no such model")
    model = INDEXED_MODELS[name].build()
    logits, rows = [], measure_rows(model, seed=0)
    for cache in (
        DynamicCache(config=model.config),
        NativeKVCache(model.config, sink=4, recent=32, flush=32, dense_below=0),
    ):
        fill_randomly(model.config, cache, rows, batch=2, context=300, seed=5, **PLACE)
        with serving(model, cache):
            logits.append(feed(model, cache, torch.tensor([[3], [4]]), 300))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif("qwen4_exp_text" not in CONFIG_MAPPING, reason="this transformers has no Qwen4")
def test_random_rows_come_with_the_positions_that_an_indexer_keeps() -> None:
    config = load_shape("qwen4-exp-indexed").part("attention").with_layers(2)
    model = random_model(config, torch.float32, "cpu", seed=0)
    logits, rows = [], measure_rows(model, seed=0)
    for cache in (DynamicCache(config=config), NativeKVCache(config, dense_below=0)):
        fill_randomly(config, cache, rows, batch=1, context=900, seed=5, **PLACE)
        with serving(model, cache):
            logits.append(feed(model, cache, torch.tensor([[3]]), 900))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_how_a_cache_is_filled() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_fill("auto", 10**6, cpu, "full") == "prefill"
    assert choose_fill("auto", 16_384, gpu, "full") == "prefill"
    assert choose_fill("auto", 16_385, gpu, "full") == "random"
    assert choose_fill("auto", 10**6, gpu, "kvpress:SnapKV") == "prefill"
    assert choose_fill("random", 100, cpu, "full") == "random"
    with pytest.raises(ValueError, match="--fill prefill"):
        choose_fill("random", 100, cpu, "kvpress:SnapKV")
