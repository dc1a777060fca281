"""A save that is killed, or finds no room: what was there before, or the new cache, whole."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
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


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 250_000)


def _filled(model: PreTrainedModel, salt: int, tokens: int = 400) -> FlatKVCache:
    cache = FlatKVCache(model.config, **OPTIONS)
    with torch.no_grad():
        model(prompt(4, tokens, salt=salt), past_key_values=cache)
    return cache


@pytest.fixture(scope="module")
def old(model: PreTrainedModel) -> FlatKVCache:
    return _filled(model, 1)


@pytest.fixture(scope="module")
def new(model: PreTrainedModel) -> FlatKVCache:
    return _filled(model, 2)


def _same(one: FlatKVCache, two: FlatKVCache) -> bool:
    pairs = [
        (a.state_dict(), b.state_dict())
        for a, b in zip(one.retrieval_layers, two.retrieval_layers, strict=True)
    ]
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def _in_child(work: Callable[[], None], wait: Callable[[int], None] = lambda pid: None) -> int:
    """Run ``work`` in a process of its own; returns its status, 0 where it ended well."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except OSError as error:
            os._exit(7 if "free space on this disk" in str(error) else 8)
        os._exit(0)
    wait(child)
    return os.waitpid(child, 0)[1]


def _check(model: PreTrainedModel, place: Path, old: FlatKVCache, new: FlatKVCache) -> str:
    """Which of the two is in ``place``, as a whole; a later save leaves nothing else behind."""
    there = FlatKVCache.from_pretrained(place, model.config)
    is_old, is_new = _same(there, old), _same(there, new)
    assert is_old != is_new
    there.save_pretrained(place)
    named = json.loads((place / "cache.json").read_text())["files"]
    assert {path.name for path in place.iterdir()} == {"cache.json", *named}
    assert len(named) > 2
    return "old" if is_old else "new"


@pytest.mark.parametrize(
    "number",
    [*range(FEW), *(pytest.param(n, marks=pytest.mark.slow) for n in range(FEW, MANY))],
)
def test_a_save_killed_at_any_moment_leaves_the_old_or_the_new(
    model: PreTrainedModel, old: FlatKVCache, new: FlatKVCache, number: int, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    begin = time.perf_counter()
    old.save_pretrained(place)
    moment = random.Random(number).uniform(0, 1.2) * (time.perf_counter() - begin)

    def wait(child: int) -> None:
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)

    _in_child(lambda: new.save_pretrained(place, overwrite=True), wait)
    _check(model, place, old, new)


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_full_disk_leaves_the_old(
    model: PreTrainedModel, old: FlatKVCache, new: FlatKVCache, limit: int, tmp_path: Path
) -> None:
    old.save_pretrained(tmp_path)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        new.save_pretrained(tmp_path, overwrite=True)

    assert os.waitstatus_to_exitcode(_in_child(work)) == 7
    named = json.loads((tmp_path / "cache.json").read_text())["files"]
    assert {path.name for path in tmp_path.iterdir()} == {"cache.json", *named}
    assert _check(model, tmp_path, old, new) == "old"
