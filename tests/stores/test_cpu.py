"""CpuStore: attention where the rows lie gives what the rows give anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hf_kvret import (
    CTkvrCache,
    FlatKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
    TokenBlock,
)
from hf_kvret.contracts.store import scores_of_gathered
from hf_kvret.registry import attach
from hf_kvret.stores import CpuStore, PagedStore
from hf_kvret.stores.memory import HostMemory
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

CPU = torch.device("cpu")
HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 12, 20
# fp32 sums of some tens of products, in another order.
ERROR = 1e-5


def _append(stores: tuple[CpuStore, PagedStore], count: int, batch: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, HEADS, count, KEY_DIM, generator=generator)
    values = torch.randn(batch, HEADS, count, VALUE_DIM, generator=generator)
    for store in stores:
        store.append(TokenBlock(keys, values, len(store)))


def _scores(
    query: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    repeats = query.shape[1] // keys.shape[1]
    dots = (query.unsqueeze(3) * keys.repeat_interleave(repeats, dim=1)).sum(-1) * 0.5
    capped = dots if softcap is None else softcap * torch.tanh(dots / softcap)
    holes = (ids < 0).repeat_interleave(repeats, dim=1)
    return capped.masked_fill(holes, float("-inf"))


def _check(stores: tuple[CpuStore, PagedStore], batch: int, choose: random.Random) -> None:
    held, share = len(stores[0]), choose.choice([1, GROUP])
    queries, count = choose.randint(1, 3), choose.randint(1, held)
    ids = torch.rand(batch, HEADS * share, queries, held).argsort(-1)[..., :count].int()
    ids[torch.rand(ids.shape) < 0.2] = -1
    query = torch.randn(batch, HEADS * GROUP, queries, KEY_DIM)
    softcap = choose.choice([None, 2.0])
    results = [store.attend(query, ids, 0.5, softcap) for store in stores]
    scores = [store.scores(query, ids, 0.5, softcap) for store in stores]
    wanted = _scores(query, stores[1].gather(ids)[0], ids, softcap)
    for found in (*scores, scores_of_gathered(stores[0], query, ids, 0.5, softcap)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=ERROR)
    if share == 1:
        best = stores[0].best(query, ids, count, 0.5, softcap)
        assert torch.equal(best, stores[1].best(query, ids, count, 0.5, softcap))
        assert torch.equal(best.sort(-1).values, ids.sort(-1).values), "all of them, best first"
    later = stores[0].begin(query, ids, 0.5, softcap)
    for got, again, wanted in zip(results[0], later(), results[1], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=ERROR)
        assert torch.equal(got, again)
    for got, wanted in zip(*(store.gather(ids) for store in stores), strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(*(store.chunks(64) for store in stores), strict=True):
        assert got[0] == wanted[0]
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[2], wanted[2])


@pytest.mark.parametrize("seed", range(3))
def test_no_operation_makes_it_differ_from_plain_host_rows(seed: int) -> None:
    choose, batch = random.Random(seed), 2
    stores = CpuStore(CPU), PagedStore(HostMemory(CPU))
    _append(stores, 70, batch, seed)
    for step in range(60):
        kind = choose.choice(["append", "crop", "reorder", "fork", "load"])
        if kind == "append":
            _append(stores, choose.randint(1, 80), batch, step)
        elif kind == "crop":
            for store in stores:
                store.crop(max(1, len(store) - 50))
        elif kind == "reorder":
            rows = torch.tensor([choose.randrange(batch) for _ in range(choose.randint(1, 3))])
            batch = len(rows)
            for store in stores:
                store.reorder(rows)
        elif kind == "fork":
            twins = stores[0].fork(), stores[1].fork()
            _append(stores, 9, batch, 1000 + step)
            stores = twins
        else:
            fresh = CpuStore(CPU), PagedStore(HostMemory(CPU))
            for new, old in zip(fresh, stores, strict=True):
                new.load_state_dict(old.state_dict(), CPU)
            stores = fresh
        _check(stores, batch, choose)


def test_everything_it_holds_is_host_memory() -> None:
    stores = CpuStore(CPU), PagedStore(HostMemory(CPU))
    _append(stores, 70, 2, 0)
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
