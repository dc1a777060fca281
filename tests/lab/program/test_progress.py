"""Bars move while a prompt is read, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret import attach
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.program import progress
from hf_kvret.testing import MODELS


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_next"])
def test_a_prompt_moves_its_bar_part_by_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[float] = []

    class Bar(progress.tqdm):
        def update(self, n: Any = 1) -> Any:
            places.append(self.n + n)
            return super().update(n)

    monkeypatch.setattr(progress, "tqdm", Bar)
    model = MODELS[name].build()
    attach(model)
    tokens = torch.arange(3, 63)
    plain = Reader(model, choose_cache("flat"), 64)
    expected = plain.feed(tokens)
    reader = Reader(model, choose_cache("flat"), 64)
    assert torch.equal(reader.prefill(tokens), expected)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    assert len(places) >= 2 * layers
    assert places == sorted(places) and places[-1] == pytest.approx(60)
    # Hooks are gone: another pass moves nothing.
    moved = len(places)
    reader.feed(tokens[:1])
    assert len(places) == moved
