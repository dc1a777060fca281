"""Which folder may be saved to, what is replaced there, and what a check of it says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_kvret import FlatKVCache, attach
from hf_kvret.saved import shards
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from .save_steps import killed_saves
from .saved_files import read_saved, write_saved

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}


def _filled(model: PreTrainedModel, salt: int = 0) -> FlatKVCache:
    attach(model)
    cache = FlatKVCache(model.config, **OPTIONS)
    with torch.no_grad():
        for count in (40, 1):
            model(prompt(2, count, salt=salt), past_key_values=cache)
    return cache


def test_a_save_killed_at_any_step_leaves_the_old_or_the_new(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 80_000)
    old, new = _filled(llama), _filled(llama, salt=1)
    states = [cache.retrieval_layers[1].state_dict() for cache in (old, new)]
    seen = []
    for place in killed_saves(tmp_path, old.save_pretrained, new.save_pretrained):
        there = FlatKVCache.from_pretrained(place, llama.config)
        found = there.retrieval_layers[1].state_dict()
        same = [all(torch.equal(found[name], one[name]) for name in one) for one in states]
        assert sum(same) == 1
        seen.append(same[1])
        # A later save leaves nothing else behind.
        there.save_pretrained(place)
        named = read_saved(place)[0]["files"]
        assert len(named) > 1
        assert {path.name for path in place.iterdir()} == {"cache.json", ".cache.json.lock", *named}
    assert seen == sorted(seen) and {*seen} == {False, True}


def test_what_is_no_cache_is_not_replaced_and_an_older_format_is(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "cache.json"
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="not of a saved cache, or damaged"):
        _filled(llama).save_pretrained(tmp_path)
    assert path.read_text() == '{"model_type": "llama"}'
    path.unlink()
    _filled(llama).save_pretrained(tmp_path)
    write_saved(tmp_path, read_saved(tmp_path)[0] | {"format_version": 2})
    FlatKVCache(llama.config, **OPTIONS).save_pretrained(tmp_path)
    assert FlatKVCache.from_pretrained(tmp_path, llama.config).get_seq_length() == 0


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    model = MODELS["gemma3"].build()
    _filled(model).save_pretrained(tmp_path)
    content, tensors = read_saved(tmp_path)
    window = content["layers"][0]["values"]["sliding_window"]
    content["layers"][0]["values"]["sliding_window"] = window + 3
    write_saved(tmp_path, content, tensors)
    with pytest.raises(ValueError, match=f"sliding_window is {window + 3}, and this model's is"):
        FlatKVCache.from_pretrained(tmp_path, model.config)


def test_unknown_attributes_are_not_lost_in_silence(tmp_path: Path) -> None:
    cache = _filled(MODELS["gemma3"].build())
    layer = next(one for one in cache.layers if isinstance(one, DynamicSlidingWindowLayer))
    layer.new_states = torch.zeros(3)
    with pytest.raises(TypeError, match="cannot save the attribute new_states of a Dynamic"):
        cache.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("[!.]*"))
