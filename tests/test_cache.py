"""RetrievalCache: which layers it takes, and the edges of its life."""

from __future__ import annotations

import dataclasses
import gc
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, RetrievalCache
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.models.compatibility import retrieval_shapes
from hf_kvret.observe import observers
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels import host_library

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize("name", MODELS)
def test_exactly_the_full_attention_layers_become_ours(name: str) -> None:
    model = MODELS[name]
    config = model.config()
    cache, dynamic = FlatKVCache(config), DynamicCache(config=config)
    ours = [type(layer) is RetrievalLayer for layer in cache.layers]
    assert tuple(number for number, mine in enumerate(ours) if mine) == model.full_attention
    for mine, layer, other in zip(ours, cache.layers, dynamic.layers, strict=True):
        assert mine or type(layer) is type(other)


@pytest.mark.parametrize("length", [1, 9, 13])
def test_prompts_around_the_size_of_the_window(llama: PreTrainedModel, length: int) -> None:
    expected = llama.generate(prompt(1, length), **RUN)
    cache = ParisKVCache(llama.config, **SMALL)
    assert torch.equal(llama.generate(prompt(1, length), **RUN, past_key_values=cache), expected)
    assert cache.get_seq_length() == length + 15
    assert cache.stats()["layers"][0]["selected"] > 0


def _parts(cache: RetrievalCache) -> list[weakref.ref[Any]]:
    """A layer of a filled cache and what it holds."""
    layer = cache.retrieval_layers[-1]
    kv: Any = layer.kv
    return [weakref.ref(part) for part in (layer, kv, kv.index, kv.store, kv.window.keys)]


def test_the_memory_of_a_dropped_cache_is_free_at_once(llama: PreTrainedModel) -> None:
    """A fork holds none of it but the cold rows."""
    cache = ParisKVCache(llama.config, **{**COVERING_OPTIONS, "top_k": 4})
    gc.disable()
    try:
        llama.generate(prompt(1, 60), **RUN, past_key_values=cache)
        fork = cache.fork()
        mine, theirs = _parts(cache), _parts(fork)
        del cache
        assert [part() for part in mine] == [None] * 5
        assert all(part() is not None for part in theirs)
        del fork
        assert [part() for part in theirs] == [None] * 5
    finally:
        gc.enable()


def test_a_cache_is_saved_and_not_pickled(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="save_pretrained"):
        pickle.dumps(FlatKVCache(llama.config))


def test_every_layer_knows_its_heads(llama: PreTrainedModel) -> None:
    """Without them a loaded state is not compared with the model's query heads."""
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    assert [layer.layer_info.shape for layer in cache.retrieval_layers] == list(
        retrieval_shapes(llama.config).values()
    )


@pytest.mark.parametrize("sink", [0, 60])
def test_any_number_of_sinks(llama: PreTrainedModel, sink: int) -> None:
    """60 is more than there are cold tokens: all are sinks and none is left to select."""
    expected = llama.generate(prompt(1, 50), **RUN)
    cache = FlatKVCache(llama.config, **{**SMALL, "sink": sink})
    assert torch.equal(llama.generate(prompt(1, 50), **RUN, past_key_values=cache), expected)
    assert (cache.stats()["layers"][0]["selected"] > 0) == (sink < 60)


def test_a_small_budget_is_kept_to(llama: PreTrainedModel) -> None:
    for top_k, each in ((3, 3), (0.1, 5)):
        cache = ParisKVCache(llama.config, **{**SMALL, "top_k": top_k})
        llama.generate(prompt(1, 50), max_new_tokens=2, past_key_values=cache)
        assert cache.stats()["layers"][1]["selected"] == 2 * each


def test_inference_mode_serves_what_no_grad_filled(llama: PreTrainedModel) -> None:
    hf_kvret.attach(llama)
    expected = llama.generate(prompt(1, 40), **RUN)[0, 40:]
    cache, ids = ParisKVCache(llama.config, **SMALL), prompt(1, 40)
    for step in range(16):
        with torch.inference_mode() if step % 2 else torch.no_grad():
            ids = llama(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        assert ids.item() == expected[step]


def test_a_request_saved_with_all_options_comes_back_and_runs(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    options = dataclasses.asdict(ParisConfig(**SMALL))
    request = GenerationConfig(cache_implementation="paris", cache_config=options, **RUN)
    request.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    loaded.pad_token_id, loaded.return_dict_in_generate = 0, True
    result = llama.generate(prompt(1, 40), generation_config=loaded)
    assert result.past_key_values.options == ParisConfig(**SMALL)
    assert torch.equal(result.sequences, llama.generate(prompt(1, 40), **RUN))


def test_an_unknown_store_is_refused_and_auto_stays_on_a_cpu(llama: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError,
        match="choose one of device, host, resident, cpu, higgs, higgs-host, disk, auto",
    ):
        FlatKVCache(llama.config, store="tape")
    cache = FlatKVCache(llama.config, **SMALL)
    assert cache.stats()["store"] is None, "nobody needed one yet"
    llama.generate(prompt(1, 40), **RUN, past_key_values=cache)
    assert cache.stats()["store"] == "device"


@pytest.mark.parametrize(("gpu", "library"), [(False, False), (True, False), (False, True)])
def test_missing_kernels_are_told_of_once_where_no_other_does_the_work(
    gpu: bool,
    library: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With their cost, and what to install."""
    monkeypatch.delenv(host_library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(host_library, "_places", lambda: iter([tmp_path / "none.so"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    if library:
        monkeypatch.setattr(observers.host_library, "why_not", lambda: "")
    host_library.opened.cache_clear()
    observers.log_missing_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="hf_kvret"):
            for _ in range(3):
                FlatKVCache(MODELS["llama"].config())
    finally:
        host_library.opened.cache_clear()
        observers.log_missing_kernels.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (not gpu and not library)
    for message in messages:
        assert "2 to 6 times as long" in message and "\n" not in message
        assert message.endswith("Install one (GCC or Clang) and install hf_kvret again")
