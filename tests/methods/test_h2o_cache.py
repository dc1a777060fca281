"""H2O's published protocol, and H2OCache in the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import ColdTokens, FlatKVCache
from hf_kvret.methods.h2o import H2OCache, H2OConfig, H2OIndex
from hf_kvret.testing import COVERING_OPTIONS, MODELS, failures, run_conformance
from hf_kvret.testing.scenario import prompt

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 0.2}
TELLING_MODES = (
    "greedy_ragged",
    "beams_ragged",
    "prompt_lookup",
    "chunked_prefill",
    "second_turn_ragged",
    "crop_deep",
    "prefix_reuse",
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "prompt_len=0"),
        ((1.5,), TypeError, "prompt_len must be an int"),
        ((10, 0.0), ValueError, "share=0.0"),
        ((10, "all"), TypeError, "share must be a number"),
    ],
    ids=str,
)
def test_a_bad_protocol_is_named(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        H2OConfig.for_prompt(*arguments)


def test_the_published_protocol_keeps_a_fifth_half_of_it_recent() -> None:
    options = H2OConfig.for_prompt(1000, store="device")
    assert (options.top_k, options.recent, options.sink) == (100, 100, 0)
    assert (options.flush, options.dense_below, options.store) == (1, 0, "device")
    model = MODELS["llama"].build()
    cache = H2OCache(model.config, H2OConfig.for_prompt(60))
    model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=20, do_sample=False)
    heads = model.config.num_key_value_heads
    for layer in cache.stats()["layers"]:
        # 6 heavy hitters and at least 6 recent tokens of 60; 60 + 19 tokens were taken in.
        assert layer["selected"] == layer["steps"] * heads * 6
        assert layer["cold_tokens"] in (79 - 6, 79 - 7)
        assert layer["evicted"] == (layer["cold_tokens"] - 6) * heads


class _CheckedIndex(H2OIndex):
    """Selects all that a covering budget allows, after checking what a small one selects."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids, valid = super().search(query, cold), cold.valid
        evicted = self._scores.rows[:, :, : valid.shape[1]] == float("-inf")
        flat = ids.flatten(2).long()
        indices = flat.clamp(min=0)
        assert not evicted.gather(2, indices)[flat >= 0].any()
        allowed = valid[:, None].expand_as(evicted)
        assert allowed.gather(2, indices)[flat >= 0].all()
        # Every token is kept, evicted, or not to be selected.
        assert torch.equal((allowed & ~evicted).sum(-1), (ids[:, :, 0] >= 0).sum(-1))
        every = torch.arange(valid.shape[1], dtype=torch.int32).expand_as(evicted)
        return every.masked_fill(~allowed, -1)[:, :, None].expand(-1, -1, query.shape[2], -1)


class _CheckedCache(H2OCache):
    @classmethod
    def make_index(cls, options: Any, layer: int) -> H2OIndex:
        return _CheckedIndex(options)


@pytest.mark.parametrize(("model", "observed"), [("gemma2", None), ("gpt_oss", 4)])
def test_every_mode_of_use_evicts_and_never_selects_what_is_evicted(
    model: str, observed: int | None
) -> None:
    """The text is that of full attention, as the checked index then lets all pass."""
    caches = []

    def make(built: PreTrainedModel) -> H2OCache:
        caches.append(_CheckedCache(config=built.config, observed=observed, **SMALL))
        return caches[-1]

    results = run_conformance(make, [model], TELLING_MODES)
    assert not failures(results)
    assert sum(layer["evicted"] for cache in caches for layer in cache.stats()["layers"]) > 1000


def test_heavy_hitters_hold_more_attention_than_as_many_other_tokens() -> None:
    """Recall of attention mass on a model, beside the oracle's and a random share."""
    model = MODELS["llama"].build()
    masses = {}
    for name, cache_class in (("h2o", H2OCache), ("flat", FlatKVCache)):
        cache = cache_class(config=model.config, **{**SMALL, "track_recall": True})
        model.generate(prompt(1, 120), past_key_values=cache, max_new_tokens=8, do_sample=False)
        layers = cache.stats()["layers"]
        masses[name] = sum(layer["recall_mass"] for layer in layers) / len(layers)
    assert 0.2 < masses["h2o"] < masses["flat"]
