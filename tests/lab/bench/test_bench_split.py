"""What a benchmark predicts and counts of rows that are split between device and host."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import CTkvrCache, FlatKVCache
from hf_kvret.lab.bench.filling import feed, random_tokens, serving
from hf_kvret.lab.bench.floors import Selections, decode_floor, selections
from hf_kvret.lab.bench.limits import predict_need
from hf_kvret.lab.bench.opponents import choose_bench_caches
from hf_kvret.lab.bench.shapes import WeightBytes, load_shape, random_model
from hf_kvret.lab.evaluate.reader import Usage

WEIGHTS = WeightBytes(held=5000, read=4000, row=10)
# tiny: two layers, two KV heads of 64, fp32; pages of 64 tokens.
LAYERS, HEADS, ROW = 2, 2, 2 * 256
PAGE = HEADS * 64 * ROW
BATCH, TOKENS = 3, 140
# 140 tokens without the recent 8 are three pages of each row.
OPTIONS = {"top_k": 5, "sink": 4, "recent": 8, "flush": 8, "dense_below": 0}
NOTHING = Usage(0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(load_shape("tiny").config, torch.float32, "cpu", seed=0)


@pytest.mark.parametrize("columns", [0, 1, 2, 3])
def test_selected_rows_come_over_the_bus_as_far_as_they_lie_there(
    model: PreTrainedModel, columns: int
) -> None:
    budget = max(1, columns * BATCH * PAGE * LAYERS)
    cache = FlatKVCache(model.config, store="split", device_budget=budget, **OPTIONS)
    tokens = random_tokens(model, BATCH, TOKENS + 2, seed=0)
    with serving(model, cache):
        feed(model, cache, tokens[:, :TOKENS], 0)
        feed(model, cache, tokens[:, TOKENS : TOKENS + 1], TOKENS)
        before = selections(cache)
        feed(model, cache, tokens[:, TOKENS + 1 :], TOKENS + 1)
    chosen = selections(cache).since(before, 1)
    rows, share = LAYERS * HEADS * BATCH * 5, 1 - columns / 3
    assert chosen.rows == rows
    assert chosen.bus_rows == pytest.approx(rows * share)
    assert chosen.bus_bytes == pytest.approx(rows * share * ROW)
    assert chosen.near_bytes + chosen.bus_bytes == pytest.approx(rows * ROW)


def test_rows_that_move_to_the_host_later_do_not_count_for_steps_before(
    model: PreTrainedModel,
) -> None:
    before = Selections(rows=100, bus_rows=100, bus_bytes=1000, host_share=0.0)
    after = Selections(rows=130, bus_rows=130, near_bytes=5, bus_bytes=1300, host_share=0.5)
    found = after.since(before, 10)
    assert found == Selections(3, 1.5, 15.5, 15, 1)


def test_compared_keys_are_counted_where_they_lie(model: PreTrainedModel) -> None:
    floors = []
    for rerank in ("auto", "lists"):
        cache = CTkvrCache(
            model.config,
            tokens_per_centroid=4,
            rerank=rerank,
            store="split",
            device_budget=BATCH * PAGE * LAYERS,
            **OPTIONS,
        )
        tokens = random_tokens(model, BATCH, TOKENS + 1, seed=0)
        with serving(model, cache):
            feed(model, cache, tokens[:, :TOKENS], 0)
            feed(model, cache, tokens[:, TOKENS:], TOKENS)
        floors.append(decode_floor(WEIGHTS, cache, NOTHING, BATCH, Selections(), on_host=False))
    on_bus = floors[0].host_bytes - floors[1].host_bytes
    beside = floors[0].device_bytes - floors[1].device_bytes
    assert on_bus > 0 and beside > 0
    # Two of three pages of each row are on the host.
    assert on_bus == pytest.approx(2 * beside)


def test_a_split_store_is_predicted_to_fill_its_budget_first() -> None:
    config = load_shape("llama-3.1-8b").config
    texts = [
        "flat:store=device",
        "flat:store=host",
        "flat:store=split:device_budget=30MB",
        "flat:store=auto:device_budget=1000GB",
        "flat:store=split",
    ]
    choices = choose_bench_caches(texts, {}, "cpu")
    rows = 2 * 32 * 8 * 128 * 2 * 1000
    near, far, split, ample, unknown = (
        predict_need(config, choices[text], 1, 1000, torch.bfloat16) for text in texts
    )
    assert (split.host, split.device) == (rows - 30_000_000, far.device + 30_000_000)
    assert ample == near and unknown == far
