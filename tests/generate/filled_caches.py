"""Caches that ``generate`` filled with text, and the ways in which a test goes on with one."""

import copy
from pathlib import Path
from typing import Any

import torch

import hf_kvret
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def new_cache(model: Any) -> hf_kvret.FlatKVCache:
    return hf_kvret.FlatKVCache(model.config, **COVERING_OPTIONS)


def filled(model: Any) -> tuple[hf_kvret.FlatKVCache, torch.Tensor]:
    """A cache that ``generate`` filled, and a prompt that goes on with it."""
    cache = new_cache(model)
    answer = model.generate(prompt(1, 50), past_key_values=cache, **RUN)
    return cache, torch.cat([answer, prompt(1, 20, salt=1)], dim=1)


def held_ids(cache: hf_kvret.RetrievalCache) -> list[list[int]]:
    ids = cache.input_ids
    assert ids is not None and ids.dtype == torch.int64
    return ids.tolist()


def as_it_is(cache: Any, directory: Path, model: Any) -> Any:
    return cache


def forked(cache: Any, directory: Path, model: Any) -> Any:
    return copy.deepcopy(cache)


def saved(cache: Any, directory: Path, model: Any) -> Any:
    cache.save_pretrained(directory)
    return type(cache).from_pretrained(directory, model.config)
