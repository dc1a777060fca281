"""Models whose layers attend and keep a linear state: forks, files, crops and passes that broke."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

import hf_kvret
from hf_kvret import FlatKVCache
from hf_kvret.layer.hybrid import HybridLayer
from hf_kvret.testing import COVERING_OPTIONS, HYBRID_MODELS, MODELS
from hf_kvret.testing.scenario import prompt, ragged


@pytest.fixture(params=HYBRID_MODELS)
def filled(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, FlatKVCache, torch.Tensor]:
    """A model, a cache that it has filled, and the mask of what is in it."""
    model = HYBRID_MODELS[request.param].build()
    ids, mask = ragged((90, 71))
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=3)
    return model, cache, torch.cat([mask, mask.new_ones(2, 2)], dim=1)


Filled = tuple[PreTrainedModel, FlatKVCache, torch.Tensor]


def step(
    model: PreTrainedModel, cache: Any, mask: torch.Tensor, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    hf_kvret.attach(model)
    more = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    tokens = prompt(2, 1) if tokens is None else tokens
    with torch.no_grad():
        logits = model(tokens, attention_mask=more, past_key_values=cache).logits
    hf_kvret.restore(model)
    return logits


def test_forks_have_their_own_states_loaded_caches_the_same(filled: Filled, tmp_path: Path) -> None:
    model, cache, mask = filled
    twin = cache.fork()
    cache.save_pretrained(tmp_path)
    saved = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert any(".conv_states.0" in name for name in saved)
    again = FlatKVCache.from_pretrained(tmp_path, model.config)
    other = step(model, twin, mask, prompt(2, 1, salt=5))
    expected = step(model, cache, mask)
    assert torch.equal(step(model, again, mask), expected)
    assert not torch.equal(other, expected)


def test_a_cache_that_was_reset_is_as_a_new_one(filled: Filled, tmp_path: Path) -> None:
    model, cache, _ = filled
    cache.reset()
    cache.save_pretrained(tmp_path)
    ids, run = prompt(3, 50), {"max_new_tokens": 3}
    for one in (cache, FlatKVCache.from_pretrained(tmp_path, model.config)):
        result = model.generate(ids, past_key_values=one, **run)
        assert torch.equal(result, model.generate(ids, **run))


def test_states_follow_their_rows(filled: Filled) -> None:
    model, cache, mask = filled
    twin = cache.fork()
    twin.reorder_cache(torch.tensor([1, 0]))
    expected, tokens = step(model, cache, mask), prompt(2, 1).flip(0)
    torch.testing.assert_close(step(model, twin, mask.flip(0), tokens), expected.flip(0))


def test_a_crop_is_refused_before_anything_is_dropped(filled: Filled) -> None:
    model, cache, mask = filled
    expected, twin = step(model, cache.fork(), mask), cache.fork()
    twin.snapshots.reset()
    with pytest.raises(RuntimeError, match=r"a recurrent state .* there is no snapshot"):
        twin.crop(-2)
    assert torch.equal(step(model, twin, mask), expected)


def test_reports_count_states(filled: Filled) -> None:
    _, cache, _ = filled
    layers = [layer.linear for layer in cache.layers if isinstance(layer, HybridLayer)]
    layers += [layer for layer in cache.layers if type(layer) is LinearAttentionLayer]
    states = [
        state
        for layer in layers
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
    ]
    assert cache.memory().other_layers == sum(x.nbytes for x in states if x is not None) > 0


@pytest.mark.parametrize("name", ["falcon_h1", "zaya"])
def test_a_pass_that_is_refused_behind_a_state_is_noticed(name: str) -> None:
    model = HYBRID_MODELS[name].build()
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    hf_kvret.attach(model)
    with pytest.raises(RuntimeError, match="has no gradients"):
        model(prompt(1, 40), past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="the state of layer 0 is ahead"):
            model(prompt(1, 40), past_key_values=cache)
        cache.reset()
        for _ in range(2):
            model(prompt(1, 40), past_key_values=cache)


def test_a_pass_that_was_cropped_whole_may_come_again() -> None:
    """Its state led; the attention layers are as long then as when it did."""
    model = MODELS["lfm2"].build()
    cache, tokens = FlatKVCache(model.config, **COVERING_OPTIONS), prompt(1, 50)
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.activate_past_recording()
    hf_kvret.attach(model)
    results = []
    with torch.no_grad():
        model(tokens[:, :40], past_key_values=cache)
        for _ in range(2):
            results.append(model(tokens[:, 40:], past_key_values=cache).logits)
            cache.crop(-10)
    torch.testing.assert_close(*results)


def test_a_bias_by_position_is_refused() -> None:
    with pytest.raises(ValueError, match="inkling_text adds a learned bias to the scores"):
        FlatKVCache(AutoConfig.for_model("inkling_text"))
