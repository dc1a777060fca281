"""Layers that transformers keeps record the past while it drafts, and no longer."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import hf_kvret
from hf_kvret.layer.hybrid import recording
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def _break(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def _draft(model: PreTrainedModel, cache: Any, mode: str, length: int) -> torch.Tensor:
    """An answer, drafted by ``mode``; "broken": it breaks off at its second check."""
    run: dict[str, Any] = {"past_key_values": cache, "prompt_lookup_num_tokens": 3, **GREEDY}
    if mode == "broken":
        checks = iter([lambda ids, *_, **__: torch.zeros(len(ids), dtype=torch.bool), _break])
        run["stopping_criteria"] = StoppingCriteriaList([lambda *a, **k: next(checks)(*a, **k)])
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt(1, length), **run)
        return prompt(1, length)
    return model.generate(prompt(1, length), **run)


@pytest.mark.factor("mode", ["lookup", "broken"])
@pytest.mark.factor("length", [2, 60])
@pytest.mark.factor("name", ["gemma3", "lfm2"])
def test_what_records_is_cut_back_when_a_call_is_over(name: str, length: int, mode: str) -> None:
    model = MODELS[name].build()
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    text = _draft(model, cache, mode, length)
    assert not recording(cache.layers)
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False):
            assert layer.keys.shape[-2] <= layer.sliding_window - 1
        for number, state in getattr(layer, "conv_states", {}).items():
            assert state.shape[-1] == layer.conv_kernel_size[number]
    if mode == "broken":
        return
    text = torch.cat([text, prompt(1, 9)], dim=1)
    got = model.generate(text, past_key_values=cache, **GREEDY)
    assert torch.equal(got, MODELS[name].build().generate(text, **GREEDY))


def test_a_layer_that_its_owner_has_recording_goes_on() -> None:
    model = MODELS["gemma3"].build()
    cache = hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)
    cache.activate_past_recording()
    before = recording(cache.layers)
    _draft(model, cache, "lookup", 60)
    assert before and recording(cache.layers) == before
