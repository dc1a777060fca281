"""Floors, scaling and capacities are what a calculation by hand gives."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DynamicCache, PreTrainedModel, StaticCache, cache_utils

from hf_kvret import CTkvrCache, FlatKVCache
from hf_kvret.lab.bench.filling import random_tokens, serving
from hf_kvret.lab.bench.opponents import PreallocatedCache, choose_bench_cache
from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.bench.timing import (
    Floor,
    Selections,
    decode_floor,
    layer_kv_bytes,
    prefill_floor,
    round_floor,
    selections,
)
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lab.evaluate.usage import Usage
from hf_kvret.methods.ctkvr import CTkvrIndex

WEIGHTS = WeightBytes(held=5000, read=4000, row=10)
# The tiny shape has two layers and two KV heads of 64; a key of one head takes 256 bytes in fp32.
ROW = 2 * 256
BATCH, TOKENS = 3, 40
# Without the recent 8, three pages of 64 tokens of each sequence.
PAGED = 140
SMALL: dict[str, Any] = {"top_k": 5, "sink": 4, "recent": 8, "flush": 8, "dense_below": 0}
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")


def no_usage(device: int = 0, host: int = 0) -> Usage:
    return Usage(device, host, 0, 0, 0, 0)


def fill(model: PreTrainedModel, cache: Any, length: int = TOKENS, steps: int = 0) -> None:
    """Fill ``cache`` with a prompt of ``length`` tokens, and with some one by one."""
    tokens = random_tokens(model, BATCH, length + steps, seed=0)
    with serving(model, cache):
        feed(model, cache, tokens[:, :length], 0)
        for place in range(length, length + steps):
            feed(model, cache, tokens[:, place : place + 1], place)


def step(model: PreTrainedModel, cache: Any, length: int = TOKENS, count: int = 1) -> Selections:
    """What ``count`` steps behind ``length`` tokens select, per step."""
    before = selections(cache)
    with serving(model, cache):
        for place in range(length, length + count):
            feed(model, cache, random_tokens(model, BATCH, 1, seed=place), place)
    return selections(cache).since(before, count)


def test_dense_caches_read_the_rows_of_all_tokens_and_no_spare_room(model: PreTrainedModel) -> None:
    tokens = random_tokens(model, BATCH, TOKENS, seed=0)
    caches = (
        DynamicCache(config=model.config),
        StaticCache(model.config, 64),
        PreallocatedCache(model.config, 64),
    )
    rows = 2 * 2 * BATCH * TOKENS * ROW
    for cache in caches:
        feed(model, cache, tokens, 0)
        floor = decode_floor(WEIGHTS, cache, no_usage(), BATCH, Selections(), on_host=False)
        assert (floor.device_bytes, floor.host_bytes) == (4000 + 3 * 10 + rows, 0)
    moved = decode_floor(WEIGHTS, caches[0], no_usage(), BATCH, Selections(), on_host=True)
    assert (moved.device_bytes, moved.host_bytes) == (4030, rows)


@pytest.mark.parametrize("store", ["device", "host", "resident", "cpu"])
def test_retrieval_reads_window_index_and_selected_rows(model: PreTrainedModel, store: str) -> None:
    cache = FlatKVCache(model.config, store=store, rest=None, **SMALL)
    fill(model, cache)
    # With the tokens of three steps.
    window = 2 * 2 * BATCH * (4 + 11) * ROW
    # The keys of the 32 cold tokens, without the spare room that the index holds.
    index = 2 * 2 * BATCH * 32 * 256
    assert index < cache.memory().index
    chosen = step(model, cache, count=3)
    rows = 2 * 2 * BATCH * 5
    # Rows that the CPU reads cross no bus, and of a resident store those that its slots miss.
    missed = sum(layer.get("misses", 0) for layer in cache.stats()["layers"]) / 3
    assert missed < rows
    over_bus = {"device": 0, "host": rows, "resident": missed, "cpu": 0}[store]
    assert (chosen.rows, chosen.bus_rows) == (rows, over_bus)
    floor = decode_floor(WEIGHTS, cache, no_usage(), BATCH, chosen, on_host=False)
    near = 4030 + window + index + (rows - over_bus) * ROW
    assert (floor.device_bytes, floor.host_bytes) == pytest.approx((near, over_bus * ROW))


@pytest.mark.parametrize(("store", "bits"), [("higgs", 3), ("higgs-host", 3), ("higgs", 16)])
def test_coded_rows_are_read_as_they_are_kept(
    model: PreTrainedModel, store: str, bits: int
) -> None:
    choice = choose_bench_cache(f"flat:store={store}:bits={bits}", SMALL)
    cache = choice.make(model.config, TOKENS)
    fill(model, cache)
    chosen = step(model, cache)
    # Keys and values of 64 elements, each of them with a scale of two bytes.
    row = ROW if bits == 16 else 2 * (64 * bits // 8 + 2)
    read = 2 * 2 * BATCH * 5 * row
    near, far = (read, 0) if store == "higgs" else (0, read)
    assert (chosen.near_bytes, chosen.bus_bytes) == (near, far)
    none = chosen._replace(near_bytes=0, bus_bytes=0)
    floors = [
        decode_floor(WEIGHTS, cache, no_usage(), BATCH, some, on_host=False)
        for some in (none, chosen)
    ]
    assert floors[1].device_bytes - floors[0].device_bytes == near
    assert floors[1].host_bytes - floors[0].host_bytes == far


@pytest.mark.skipif(not HAS_FP8, reason="transformers before 5.23 has no fp8 cache")
def test_quantized_caches_read_what_they_hold(model: PreTrainedModel) -> None:
    cache = choose_bench_cache("quantized:backend=fp8").make(model.config, TOKENS)
    feed(model, cache, random_tokens(model, BATCH, TOKENS, seed=0), 0)
    assert layer_kv_bytes(cache.layers[0]) is None
    floor = decode_floor(WEIGHTS, cache, no_usage(device=777), BATCH, Selections(), on_host=False)
    assert floor.device_bytes == 4030 + 777


@pytest.mark.parametrize("layers", [{}, {"layers": None}, {"layers": []}])
def test_caches_without_layers_read_what_they_hold(layers: dict[str, Any]) -> None:
    cache: Any = SimpleNamespace(**layers)
    usage = no_usage(device=700, host=77)
    floor = decode_floor(WEIGHTS, cache, usage, BATCH, Selections(), on_host=False)
    assert floor.device_bytes == 4030 + 777


def test_a_round_reads_what_its_drafts_do_and_all_rows_once() -> None:
    usage, draft = Usage(0, 0, 900, 0, 0, 0), Floor(100, 10)
    assert round_floor(draft, 3, WEIGHTS, usage, on_host=False) == Floor(5200 / 4, 30 / 4)
    assert round_floor(draft, 3, WEIGHTS, usage, on_host=True) == Floor(4300 / 4, 930 / 4)


def test_a_prompt_reads_weights_once_and_writes_its_cache() -> None:
    floor = prefill_floor(WEIGHTS, no_usage(device=100, host=7), batch=2, context=5)
    assert (floor.device_bytes, floor.host_bytes) == (4000 + 2 * 5 * 10 + 100, 7)


def test_compared_keys_are_counted_where_they_lie(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CTkvrCache(model.config, tokens_per_centroid=4, store="host", **SMALL)
    fill(model, cache, PAGED, steps=1)
    cost, floors = CTkvrIndex.cost, []
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr(
                CTkvrIndex, "cost", lambda *sizes: cost(*sizes)._replace(keys_read=0)
            )
        floors.append(decode_floor(WEIGHTS, cache, no_usage(), BATCH, Selections(), on_host=False))
    on_bus = floors[0].host_bytes - floors[1].host_bytes
    beside = floors[0].device_bytes - floors[1].device_bytes
    assert on_bus > 0 and beside == 0
