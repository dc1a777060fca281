"""A cache that gives other answers than full attention is not measured; how caches are filled."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret import A2ATSCache, FlatKVCache, NativeKVCache
from hf_kvret.lab.bench.checks import Checker
from hf_kvret.lab.bench.filling import (
    choose_fill,
    fill_randomly,
    measure_rows,
    random_tokens,
    serving,
)
from hf_kvret.lab.bench.opponents import PreallocatedCache, choose_bench_cache
from hf_kvret.lab.bench.shapes import load_shape, random_model
from hf_kvret.lab.evaluate.bundled import load_bundled_model
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.testing import INDEXED_MODELS, held_tokens
from hf_kvret.testing.indexed_models import known_indexed

from .conftest import find_only, newer_half, nothing

WINDOW = {"sink": 4, "recent": 32, "flush": 32, "dense_below": 0}

Change = Callable[[torch.Tensor], torch.Tensor]


def checker(dtype: torch.dtype = torch.float32) -> Checker:
    model = random_model(load_shape("tiny").config, dtype, "cpu", seed=0)
    return Checker(model, measure_rows(model, seed=0), seed=0)


def fill(model: PreTrainedModel, cache: Cache, batch: int, context: int) -> None:
    """Write random rows into an empty cache."""
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    with serving(model, cache):
        fill_randomly(model.config, cache, measure_rows(model, 0), batch, context, 5, **place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_caches_pass_in_every_dtype(dtype: torch.dtype) -> None:
    own_checker = checker(dtype)
    for name in ("dense", "flat", "paris:store=host"):
        choice = choose_bench_cache(name, {"store": "device"})
        assert own_checker.check(choice, 128, 2, "random").startswith("equal within")


@pytest.mark.parametrize(
    ("keep", "dtype", "fill", "message"),
    [
        (newer_half, torch.float32, "prefill", r"flat: logits differ from full attention by \d"),
        (newer_half, torch.bfloat16, "random", r"flat: logits differ from full attention by \d"),
        (nothing, torch.float32, "prefill", "layers 0, 1 retrieved nothing"),
    ],
)
def test_an_index_that_loses_tokens_is_refused(
    keep: Change, dtype: torch.dtype, fill: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_only(keep, monkeypatch)
    choice = choose_bench_cache("flat")
    with pytest.raises(CheckFailed, match=message):
        checker(dtype).check(choice, 256, 1, fill)


def with_values(name: str, change: Change) -> CacheChoice:
    """A dense cache of this name that hands out changed values."""

    class Changed(PreallocatedCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().update(*args, **kwargs)
            return keys, change(values)

    return CacheChoice(name, Changed)


def swapped(values: torch.Tensor) -> torch.Tensor:
    return values.flip(2)


def test_dense_caches_are_checked_and_those_inexact_by_design_are_finite() -> None:
    with pytest.raises(CheckFailed, match="mine: logits differ"):
        checker().check(with_values("mine", swapped), 128, 1, "prefill")
    coded = replace(with_values("quantized", swapped), is_exact=False)
    assert checker().check(coded, 128, 1, "prefill") == "finite; not exact by design"
    with pytest.raises(CheckFailed, match="quantized: logits are not finite"):
        checker().check(with_values(coded.name, lambda values: values / 0), 128, 1, "prefill")


def test_random_rows_have_positions_for_indexes_that_need_them() -> None:
    model = load_bundled_model()
    cache = A2ATSCache(model.config, dense_below=0, recent=32, flush=32)
    fill(model, cache, batch=2, context=300)
    with serving(model, cache):
        feed(model, cache, random_tokens(model, 2, 1, 5), 300)
    assert all(layer.selected > 0 for layer in cache.retrieval_layers)


def test_random_rows_are_the_same_for_every_cache_and_as_large_as_the_models_own(
    model: PreTrainedModel,
) -> None:
    plain = DynamicCache(config=model.config)
    fill(model, plain, batch=2, context=300)
    for layer, like in zip(plain.layers, measure_rows(model, 0), strict=True):
        assert layer.keys.shape == (2, 2, 300, 64)
        # 77,000 numbers: their standard deviation is known to half a percent.
        assert float(layer.keys.std()) == pytest.approx(like.key_scale, rel=0.02)
        assert float(layer.values.std()) == pytest.approx(like.value_scale, rel=0.02)
    ours = FlatKVCache(model.config, store="device", **WINDOW)
    fill(model, ours, batch=2, context=300)
    kv = ours.retrieval_layers[1].kv
    assert kv is not None and (kv.length, kv.cold_len) == (300, 268)
    keys, values = held_tokens(kv)
    assert torch.equal(keys, plain.layers[1].keys)
    assert torch.equal(values, plain.layers[1].values)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v32", "minimax_m3", "dots3_note"),
        # Its indexer keeps positions, too.
        pytest.param("qwen4_exp", marks=pytest.mark.slow),
    ],
)
def test_random_rows_come_with_keys_of_the_indexer(name: str) -> None:
    """Behind the same random rows, ours gives the logits of transformers' own cache."""
    if name not in known_indexed():
        pytest.skip("this transformers has no such model")
    config, batch = INDEXED_MODELS[name].config(), 2
    if name == "qwen4_exp":
        # Its linear layers have no keys and values that random rows could stand for.
        config.layer_types, batch = ["indexed_attention"] * config.num_hidden_layers, 1
    model, logits = random_model(config, torch.float32, "cpu", 0), []
    for cache in (DynamicCache(config=model.config), NativeKVCache(model.config, **WINDOW)):
        fill(model, cache, batch, 300)
        with serving(model, cache):
            logits.append(feed(model, cache, torch.full((batch, 1), 3), 300))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_how_a_cache_is_filled() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    full, stranger = choose_bench_cache("full"), choose_bench_cache("mine=module:make")
    assert choose_fill("auto", 10**6, cpu, full) == "prefill"
    assert choose_fill("auto", 16_384, gpu, full) == "prefill"
    assert choose_fill("auto", 16_385, gpu, full) == "random"
    assert choose_fill("auto", 100, cpu, full, latent=True) == "random"
    assert choose_fill("auto", 10**6, gpu, stranger) == "prefill"
    assert choose_fill("random", 100, cpu, full) == "random"
    with pytest.raises(ValueError, match="--fill prefill"):
        choose_fill("random", 100, cpu, stranger)
