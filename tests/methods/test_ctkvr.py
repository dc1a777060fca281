"""CTkvrIndex: what it selects, apart from the output, and the cache in the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache
from hf_kvret.generate.attach import attach
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig, CTkvrIndex
from hf_kvret.observe.recall import exact_scores
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels.relevance import group_relevance

from .codebooks import GROUP, HEADS
from .index_runs import IndexRun
from .watched_stores import normal, ragged, slot_sets

DIM, RECENT = 32, 20


def _options(**changes: Any) -> CTkvrConfig:
    return CTkvrConfig.from_options(**{"tokens_per_centroid": 8, "max_draft": 4, **changes})


def _lists(run: IndexRun, query: torch.Tensor, nprobe: int = 4) -> torch.Tensor:
    """``[B, H, Q, c, width]``: the lists of the centroids nearest to ``query``."""
    grouped = query.unflatten(1, (HEADS, -1)).transpose(2, 3)
    return run.index._file.queue.recall(grouped, nprobe)


def _fill(
    options: CTkvrConfig,
    queries: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
    **run: Any,
) -> IndexRun:
    """An index that has read a prompt, all but ``RECENT`` tokens of it cold."""
    filled = IndexRun(lambda: CTkvrIndex(options), dim=DIM, **run)
    filled.prompt((queries, keys), valid, cuts, RECENT).ready()
    return filled


def _prompt(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(seed, 2, HEADS * GROUP, count, DIM), normal(seed + 1, 2, HEADS, count, DIM)


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("budget", [1, 12, 40])
@pytest.mark.factor("cuts", [(), (90,)])
@pytest.mark.factor("group", [1, GROUP])
def test_a_query_that_is_a_centroid_recalls_the_exact_top_k(
    group: int, budget: int, softcap: float | None, cuts: tuple[int, ...]
) -> None:
    queries, keys = _prompt(300)
    queries, valid = queries[:, : HEADS * group], ragged(2, 300)
    hidden = ~valid[:, None, :, None]
    masked = [x.masked_fill(hidden, float("nan")) for x in (queries, keys)]
    run = _fill(_options(), *masked, valid, cuts, budget=budget, softcap=softcap)
    query, length = queries[:, :, [-3, -1]], len(run.store)
    run.see(query, keys[:, :, :2])
    ids = run.search(query)
    assert ids.shape == (2, HEADS, 2, budget) and ids.dtype == torch.int32
    assert all(len(row) == budget for row in slot_sets(ids))
    every_id = torch.arange(length, dtype=torch.int32).expand(2, HEADS, 1, length).contiguous()
    scores = exact_scores(query, run.store.gather(every_id)[0][:, :, 0], run.scale, softcap)
    scores = scores.masked_fill(~valid[:, None, None, :length], float("-inf"))
    best = group_relevance(scores, HEADS).topk(budget).indices
    nearest = _lists(run, query, 1)[..., 0, :]
    for best_slots, slots in zip(slot_sets(best), slot_sets(nearest), strict=True):
        assert best_slots <= slots
    if group == 1:
        # With more heads than one, what was not recalled is missing in the softmaxes compared.
        assert slot_sets(ids) == slot_sets(best)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_rerank_takes_the_best_of_what_was_recalled(softcap: float | None) -> None:
    queries, keys = _prompt(300)
    run = _fill(_options(update=0), queries, keys, budget=15, softcap=softcap)
    query = normal(8, 2, HEADS * GROUP, 1, DIM)
    ids = run.search(query)
    recalled = _lists(run, query).flatten(2)
    scores = exact_scores(query, keys[:, :, :280], run.scale, softcap)
    marked = torch.zeros(2, HEADS, 280, dtype=torch.bool).scatter_(2, recalled.long(), True)
    marked = marked.repeat_interleave(GROUP, dim=1).unsqueeze(2)
    best = group_relevance(scores.masked_fill(~marked, float("-inf")), HEADS).topk(15).indices
    assert slot_sets(ids) == slot_sets(best)


@pytest.mark.parametrize("at_once", [False, True])
def test_without_a_rerank_every_valid_recalled_token_is_selected(at_once: bool) -> None:
    queries, keys = _prompt(300)
    valid, options = ragged(2, 300), {"update": 1, "update_lists": "recalled"} if at_once else {}
    run = _fill(_options(rerank="off", **options), queries, keys, valid, budget=8)
    # Tokens that came later are in no list: all are recalled.
    run.flush(9)
    query = queries[:, :, [-1]]
    run.see(query, keys[:, :, :1])
    lists = _lists(run, query).flatten(0, 2)
    ids = run.search(query)
    expected = [{*row.flatten().tolist(), *range(280, 289)} - {-1} for row in lists]
    assert slot_sets(ids) == expected and all(len(slots) > 2 * 8 for slots in expected)
    newest = run.index._file.queue.generations()[-1]
    assert (int(newest.slots[0, -1]) == 300) is at_once
    if at_once:
        assert torch.equal(_lists(run, query, 1)[:, :, 0, 0], ids[:, :, 0, :20])


@pytest.mark.parametrize(
    ("store", "more"),
    [("cpu", {}), ("resident", {"slots": 200})],
    ids=str,
)
def test_lists_that_cover_everything_give_full_attention(store: str, more: dict[str, Any]) -> None:
    model = MODELS["llama"].build()
    attach(model)
    options = {**COVERING_OPTIONS, "store": store, **more}
    caches = (
        FlatKVCache(model.config, **{**options, "top_k": 1.0, "slots": 1.0}),
        CTkvrCache(model.config, rerank="off", list_ratio=99.0, **{**options, "top_k": 6}),
    )
    logits = []
    for cache in caches:
        with torch.no_grad():
            model(prompt(1, 120), past_key_values=cache)
            steps = [model(prompt(1, 1), past_key_values=cache).logits for _ in range(20)]
        logits.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
    for full, ours in zip(*(cache.stats()["layers"] for cache in caches), strict=True):
        assert full["selected"] == ours["selected"] > 20 * 6 * 2


def test_slots_that_can_not_hold_what_is_recalled_are_refused() -> None:
    model = MODELS["llama"].build()
    attach(model)
    options = {**COVERING_OPTIONS, "store": "resident", "top_k": 6, "slots": 12}
    cache = CTkvrCache(model.config, rerank="off", **options)
    with torch.no_grad():
        model(prompt(1, 120), past_key_values=cache)
        with pytest.raises(ValueError, match=r"slots=12, and a query selects .*as slots=1\.0"):
            model(prompt(1, 1), past_key_values=cache)
