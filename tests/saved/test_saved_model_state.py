"""What models keep of a conversation in saved caches."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import hf_kvret

from ..pictures import Conversation, ask, flat, picture_model
from ..replay.steps import small_llama


def tensors_of(folder: Path) -> list[str]:
    names: list[str] = list(json.loads((folder / "cache.json").read_text())["tensors"])
    return [name for name in names if name.startswith("model_state")]


def test_a_saved_cache_has_the_state_of_a_model_that_keeps_some(tmp_path: Path) -> None:
    talk = Conversation(picture_model("glm_ocr"))
    cache = talk.filled()
    cache.save_pretrained(tmp_path)
    assert tensors_of(tmp_path) == ["model_state.rope_deltas"]
    loaded = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=talk.model.config)
    assert torch.equal(loaded.model_state.shift, cache.model_state.shift)
    assert int(loaded.model_state.shift) == -24
    # And so again.
    loaded.save_pretrained(tmp_path)
    again = hf_kvret.FlatKVCache.from_pretrained(tmp_path, config=talk.model.config)
    talk.check(again)


def test_a_cache_of_a_plain_text_model_is_saved_as_before(tmp_path: Path) -> None:
    model = small_llama()
    cache = flat(model)
    ask(model, {"input_ids": torch.arange(40)[None]}, cache)
    cache.save_pretrained(tmp_path)
    assert tensors_of(tmp_path) == []
