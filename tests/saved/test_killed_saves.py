"""A save that is killed leaves the cache that was there, or the new one, whole."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, attach
from hf_kvret.saved import shards
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}
# Moments of a kill, by default and in all.
FEW, MANY = 3, 30


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = MODELS["llama"].build()
    attach(model)
    return model


@pytest.fixture(scope="module")
def caches(model: PreTrainedModel) -> list[FlatKVCache]:
    """The old one and the new one."""
    caches = [FlatKVCache(model.config, **OPTIONS) for _ in range(2)]
    with torch.no_grad():
        for salt, cache in enumerate(caches):
            model(prompt(4, 400, salt=salt), past_key_values=cache)
    return caches


@pytest.mark.parametrize(
    "number",
    [*range(FEW), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FEW, MANY))],
)
def test_a_save_killed_at_any_moment_leaves_the_old_or_the_new(
    model: PreTrainedModel,
    caches: list[FlatKVCache],
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 250_000)
    old, new = caches
    begin = time.perf_counter()
    old.save_pretrained(tmp_path, overwrite=True)
    moment = random.Random(number).uniform(0, 1.2) * (time.perf_counter() - begin)
    child = os.fork()
    if child == 0:
        new.save_pretrained(tmp_path, overwrite=True)
        os._exit(0)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    there = FlatKVCache.from_pretrained(tmp_path, model.config)
    states = [cache.retrieval_layers[1].state_dict() for cache in (there, old, new)]
    same = [all(torch.equal(states[0][name], one[name]) for name in one) for one in states[1:]]
    assert sum(same) == 1
    # A later save leaves nothing else behind.
    there.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "cache.json").read_text())["files"]
    assert len(named) > 2
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"cache.json", *named}
    assert [path.name for path in tmp_path.glob(".*")] == [".cache.json.lock"]
