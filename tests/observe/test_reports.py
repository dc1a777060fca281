"""Counts and bytes, checked against numbers worked out by hand."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 5, "rest": None}


def _feed(model: PreTrainedModel, cache: Any, count: int, batch: int = 1) -> None:
    ids = torch.randint(3, 128, (batch, count), generator=torch.Generator().manual_seed(count))
    hf_kvret.attach(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)


def test_counts_of_a_hand_made_case(llama: PreTrainedModel) -> None:
    """2 KV heads, head dim 16, fp32: a row of key and value is 128 bytes."""
    cache = FlatKVCache(llama.config, **SMALL)
    _feed(llama, cache, 20)  # 12 cold, 8 recent
    _feed(llama, cache, 1)
    _feed(llama, cache, 3)  # a draft of three queries; the window holds 12 now
    _feed(llama, cache, 1)  # flushes 4: 16 cold
    _feed(llama, cache, 9)  # more than max_draft: 26 cold, 25 of them came before these nine
    candidates = cold = (12 * 1 + 12 * 3 + 16 * 1) * 2
    for number, layer in enumerate(cache.stats()["layers"]):
        assert layer == {
            "layer": number, "lost_mass": None, "steps": 3, "borrowed": 0, "queries": 5,
            "cold_tokens": 26, "candidates": candidates, "selected": 5 * 5 * 2, "cold_rows": cold,
            "read_ratio": 50 / cold, "exact_rows": 25 * 2, "bytes_fetched": (50 + 50) * 128,
        }  # fmt: skip
    assert cache.stats()["method"] == "flat" and cache.stats()["store"] == "device"
    cache.reset()
    for layer in cache.stats()["layers"]:
        assert not any(value for name, value in layer.items() if name != "layer")


@pytest.mark.parametrize("store", ["device", "host"])
def test_bytes_of_a_hand_made_case(llama: PreTrainedModel, store: str) -> None:
    cache = FlatKVCache(llama.config, store=store, **SMALL)
    _feed(llama, cache, 72)  # 64 cold tokens: one page of 64 for each layer
    report = cache.memory()
    row, layers = 2 * (16 + 16) * 4, 2
    held = [layer.kv for layer in cache.retrieval_layers]
    capacities = [kv.window.keys.shape[2] for kv in held if kv is not None]
    assert report.window == sum(capacities) * row + layers * 2 * 8
    pages, table = layers * 64 * row, layers * 4
    expected = (pages + table, 0) if store == "device" else (table, pages)
    assert (report.store_device, report.store_host) == expected
    assert report.index == layers * 2 * (64 + 256) * 16 * 4, "keys with 256 rows to spare"
    assert report.full_attention == layers * 72 * row
    assert report.other_layers == 0
    assert report.device == report.window + report.index + report.store_device
    assert report.host == report.store_host
    assert f"full attention {report.full_attention / 2**20:.1f} MiB" in str(report)


@pytest.mark.parametrize(("store", "bits"), [("higgs-host", 2), ("higgs", 16)])
def test_bytes_of_coded_rows(llama: PreTrainedModel, store: str, bits: int) -> None:
    """A key or value of 16 numbers: their codes and one scale; with 16 bits, four bytes each."""
    row = 2 * 16 * 4 if bits == 16 else 2 * (16 * bits // 8 + 2)
    cache = FlatKVCache(llama.config, store=store, bits=bits, **SMALL)
    _feed(llama, cache, 72)  # 64 cold tokens: one page of 64 for each layer
    report, layers = cache.memory(), 2
    pages, table = layers * 64 * 2 * row, layers * 4
    # A mean key of each KV head.
    table += 0 if bits == 16 else layers * 2 * 16 * 4
    expected = (pages + table, 0) if store == "higgs" else (table, pages)
    assert (report.store_device, report.store_host) == expected
    assert report.full_attention == layers * 72 * 2 * 128, "what other caches would take"
    _feed(llama, cache, 1)
    _feed(llama, cache, 9)  # more than max_draft: 74 cold, 73 of them came before these nine
    for layer in cache.stats()["layers"]:
        assert (layer["selected"], layer["exact_rows"]) == (5 * 2, 73 * 2)
        assert layer["bytes_fetched"] == (5 + 73) * 2 * row
    assert cache.stats()["store"] == store


def test_layers_that_are_not_ours_count_on_both_sides() -> None:
    model = MODELS["gemma3"].build()
    cache, dense = ParisKVCache(model.config, **SMALL), DynamicCache(config=model.config)
    for each in (cache, dense):
        _feed(model, each, 40)
    slides = dense.layers[0]
    other = slides.keys.numel() * 4 + slides.values.numel() * 4
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)
    report = cache.memory()
    scalars = report.other_layers - other
    assert 0 <= scalars < 32, "beside keys and values a sliding layer holds a scalar"
    assert report.full_attention == full + scalars
    assert [layer["layer"] for layer in cache.stats()["layers"]] == [1, 2]


def test_an_empty_cache_reports_nothing(llama: PreTrainedModel) -> None:
    cache = ParisKVCache(llama.config)
    assert cache.memory().device == cache.memory().host == cache.memory().full_attention == 0
    assert cache.stats()["store"] is None, "nobody needed one yet"
    numbers = cache.stats()["layers"][1]
    assert numbers.pop("layer") == 1 and numbers["steps"] == 0 and not any(numbers.values())
