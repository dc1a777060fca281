"""A2ATSIndex: recall of its selection against exact top-k."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch

from hf_kvret import TokenBlock
from hf_kvret.lab.calibrate.a2ats import query_metric
from hf_kvret.lab.calibrate.k_means import k_means
from hf_kvret.observe.recall import measure_recall
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing.cold import cold_tokens

from .codebooks import (
    DIM,
    GROUP,
    HEADS,
    SCALE,
    Prompt,
    Turn,
    filled,
    normal,
    write_book,
)


def test_recall_is_far_above_chance_and_rises_with_the_codewords(tmp_path: Path) -> None:
    """Keys in loose clusters, queries in few directions; one codebook for two texts."""
    turn, count, budget = Turn(pairs=2), 600, 30
    shape = torch.linspace(0.2, 2.0, DIM)
    centres = 2 * normal(10, HEADS, 1, 40, DIM)

    def tokens(seed: int) -> Prompt:
        chosen = torch.randint(40, (2, HEADS, count), generator=torch.Generator().manual_seed(seed))
        keys = centres[:, 0].expand(2, -1, -1, -1).gather(
            2, chosen.unsqueeze(-1).expand(-1, -1, -1, DIM)
        ) + 0.5 * normal(seed + 1, 2, HEADS, count, DIM)
        queries = shape * normal(seed + 2, 2, HEADS * GROUP, count, DIM)
        return Prompt(turn, queries, keys, torch.arange(count).expand(2, count))

    learned, served = tokens(20), tokens(30)
    far = learned.queries.unflatten(1, (HEADS, GROUP)).transpose(0, 1).flatten(1, 3)
    metric, _ = query_metric(far.mT.double() @ far.double() / far.shape[1])
    sample = learned.keys.transpose(0, 1).flatten(1, 2) @ metric
    queries, keys = served.seen
    store = PagedStore(DeviceMemory(torch.device("cpu")))
    store.append(TokenBlock(keys, keys, 0))
    valid, query = torch.ones(2, count, dtype=torch.bool), queries[:, :, -8:]
    exact = cold_tokens(valid, SCALE, 1, store=store)

    def recall(codewords: int, seed: int) -> float:
        words = k_means(sample, codewords, rounds=20, seed=seed)
        book = write_book(tmp_path / f"{codewords}-{seed}", turn, words=words, metric=metric)
        index = filled(book.index(), served)
        index.on_forward(query, keys[:, :, -8:], count - 8, None, served.positions[:, -8:])
        ids = index.search(query, cold_tokens(valid, SCALE, budget))
        return measure_recall(query, ids, exact).overlap

    # With few codewords one seed's recall is chance in part.
    recalls = [fmean(recall(words, seed) for seed in range(8)) for words in (4, 12, 64)]
    chance = budget / count
    assert recalls[0] > 1.5 * chance and recalls[2] > 8 * chance
    assert recalls[1] > recalls[0] + 0.1 and recalls[2] > recalls[1] + 0.1
