"""RetrievalCache: which layers it takes, and the edges of its life."""

import gc
import logging
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvret import FlatKVCache, ParisKVCache, RetrievalCache
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.observe import observers
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels import host_library

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 2}, r"bits=2 changes nothing: take store='higgs' or 'higgs-host'"),
        ({"slots": 2.0, "store": "host"}, r"slots=2\.0 changes nothing: take store='resident'"),
        ({"bits": 16, "store": "host"}, None),
        ({"bits": 2, "store": "higgs"}, None),
    ],
)
def test_options_that_nothing_reads_are_named(options: dict[str, Any], words: str | None) -> None:
    with warnings.catch_warnings() if words is None else pytest.warns(UserWarning, match=words):
        warnings.simplefilter("always" if words else "error")
        ParisKVCache(MODELS["llama"].config(), **options)


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


def test_a_cache_is_saved_and_not_pickled_and_has_a_method(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="save_pretrained"):
        pickle.dumps(FlatKVCache(llama.config))
    with pytest.raises(TypeError, match="take a method, as ParisKVCache"):
        RetrievalCache(llama.config)


@pytest.mark.parametrize(("gpu", "library"), [(False, False), (True, False), (False, True)])
def test_missing_kernels_are_told_of_once_where_no_other_does_the_work(
    gpu: bool, library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
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
