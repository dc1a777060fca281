"""Who observes a cache is told what every layer selects, whatever the method, and costs nothing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import RetrievalCache, Selection, observe, registered_methods
from hf_kvret.observe.recall import exact_scores
from hf_kvret.replay.layer_step import LayerStep
from hf_kvret_kernels._dispatch import prefer

PROMPT, STEPS = 90, 3
OPTIONS: dict[str, Any] = {"top_k": 10, "sink": 2, "recent": 8, "flush": 8, "dense_below": 0}


def prompt() -> torch.Tensor:
    return torch.randint(3, 100, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def filled(model: PreTrainedModel, method: str = "flat", **changes: Any) -> RetrievalCache:
    hf_kvret.attach(model)
    cache = registered_methods()[method](config=model.config, **{**OPTIONS, **changes})
    with torch.inference_mode():
        model(prompt(), past_key_values=cache, logits_to_keep=1)
    return cache


def steps(model: PreTrainedModel, cache: RetrievalCache, count: int = STEPS) -> list[int]:
    """Greedy tokens after the prompt."""
    token, ids = prompt()[:, -1:], []
    with torch.inference_mode():
        for _ in range(count):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            ids.append(int(token))
    return ids


@pytest.mark.parametrize("method", ["paris", "ctkvr", "h2o"])
def test_every_step_of_every_layer_is_told_of(llama: PreTrainedModel, method: str) -> None:
    """Ids are cold, each at most once, no sinks, and as many as the counters have.

    Tokens are those of a cache that nobody observes.
    """
    cache = filled(llama, method)
    twin, seen = cache.fork(), list[Selection]()
    with observe(cache, seen.append):
        assert steps(llama, cache) == steps(llama, twin)
    layers = [layer["layer"] for layer in cache.stats()["layers"]]
    assert [one.layer for one in seen] == layers * STEPS
    heads = llama.config.num_key_value_heads
    for number, one in enumerate(seen):
        step = number // len(layers)
        assert one.ids is not None
        assert one.ids.shape == (1, heads, 1, OPTIONS["top_k"])
        assert one.ids.dtype == torch.int32
        assert one.query.shape[:3] == (1, llama.config.num_attention_heads, 1)
        assert one.recent[1] == PROMPT + step + 1
        assert one.sinks.tolist() == [[0, 1]]
        for ids in one.ids[0, :, 0].tolist():
            named = [slot for slot in ids if slot >= 0]
            assert len(set(named)) == len(named)
            assert all(2 <= slot < one.recent[0] for slot in named)
    told = sum(int((one.ids >= 0).sum()) for one in seen if one.ids is not None)
    assert told == sum(layer["selected"] for layer in cache.stats()["layers"]) > 0


@pytest.mark.parametrize("backend", [None, "naive"])
def test_they_are_those_that_were_read(llama: PreTrainedModel, backend: str | None) -> None:
    """The best by the logits of the query that is told, in one call of C++ and part by part."""
    cache = filled(llama)
    seen: list[Selection] = []
    preferred = nullcontext() if backend is None else prefer(backend)
    with preferred, observe(cache, seen.append):
        steps(llama, cache, 1)
    for one in seen:
        assert one.ids is not None
        keys = cache.layers[one.layer].keys[:, :, : one.recent[0]]
        logits = exact_scores(one.query, keys, one.scale, one.softcap)
        groups = logits.softmax(-1).view(1, keys.shape[1], -1, *logits.shape[2:]).amax(2)
        groups[..., :2] = 0
        best = groups.topk(OPTIONS["top_k"]).indices
        assert torch.equal(one.ids.long().sort(-1).values, best.sort(-1).values)


def test_a_method_without_an_index_attends_to_all(llama: PreTrainedModel) -> None:
    cache = filled(llama, "aqua", top_k=None, predictor="none")
    seen: list[Selection] = []
    with observe(cache, seen.append):
        steps(llama, cache, 1)
    assert [one.layer for one in seen] == list(range(len(cache.layers)))
    assert all(one.ids is None for one in seen)


def test_nobody_is_told_afterwards_or_of_a_fork_or_a_prompt(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    seen: list[Selection] = []
    with observe(cache, seen.append), torch.inference_mode():
        steps(llama, cache.fork(), 1)
        cache.reset()
        llama(prompt(), past_key_values=cache, logits_to_keep=1)
        assert not seen
        steps(llama, cache, 1)
        assert len(seen) == len(cache.layers)
    with pytest.raises(KeyError), observe(cache, seen.append):
        raise KeyError
    steps(llama, cache, 1)
    assert len(seen) == len(cache.layers)


def test_several_may_observe_and_one_of_them_twice(llama: PreTrainedModel) -> None:
    cache = filled(llama)
    first: list[Selection] = []
    second: list[Selection] = []
    with observe(cache, first.append), observe(cache, second.append):
        with observe(cache, first.append):
            steps(llama, cache, 1)
        steps(llama, cache, 1)
    assert len(first) == 3 * len(cache.layers)
    assert len(second) == 2 * len(cache.layers)


def test_an_observed_layer_says_why_its_steps_are_not_captured(llama: PreTrainedModel) -> None:
    """What was captured before is not valid any more."""
    cache = filled(llama)
    layer = cache.retrieval_layers[0]
    edits = layer.edits
    assert LayerStep(layer).capture_obstacle is None
    with observe(cache, print):
        assert "observed" in str(LayerStep(layer).capture_obstacle)
        assert layer.edits > edits
    assert LayerStep(layer).capture_obstacle is None


def test_another_cache_is_refused(llama: PreTrainedModel) -> None:
    with (
        pytest.raises(TypeError, match="only a retrieval cache selects"),
        observe(DynamicCache(config=llama.config), print),
    ):
        pass
