"""CpuStore: its bytes, and caches that attend where the rows lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret import (
    CTkvrCache,
    FlatKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.generate.attach import attach
from hf_kvret.stores import CpuStore, PagedStore
from hf_kvret.stores.memory import HostMemory
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

from .rows import CPU, extend


def test_all_its_bytes_are_host_memory() -> None:
    stores = CpuStore(CPU), PagedStore(HostMemory(CPU))
    extend(*stores, count=70)
    assert stores[0].host_nbytes() == stores[0].nbytes() == stores[1].nbytes()


@pytest.mark.parametrize("cache_class", [FlatKVCache, ParisKVCache, LRQKCache, CTkvrCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_with_every_index(cache_class: type[RetrievalCache], dtype: torch.dtype) -> None:
    model = MODELS["llama"].build().to(dtype)
    attach(model)
    options: dict[str, Any] = {"top_k": 8, "sink": 2, "recent": 8, "flush": 8, "dense_below": 0}
    logits = []
    for store in ("host", "cpu"):
        cache = cache_class(model.config, store=store, **options)
        with torch.no_grad():
            model(prompt(1, 90), past_key_values=cache)
            steps = [model(prompt(1, 1), past_key_values=cache).logits for _ in range(20)]
        logits.append(torch.cat(steps, dim=1).float())
        assert all(layer["selected"] for layer in cache.stats()["layers"])
    # bf16 rounds every layer's output; another order of sums may change its last bit.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(*logits, rtol=0, atol=tolerance)
