"""How far caches' logits are from full attention's, place by place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from head_caches import expected_of
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.reader import Reader


def follow(
    readers: Sequence[Reader], windows: Sequence[torch.Tensor], step: int, **changes: Any
) -> dict[str, Any]:
    """Go on from contexts to the ends of their windows; plain JSON values.

    ``kl`` is the mean divergence of the next token's distribution from full attention's, in nats,
    ``kl_error`` its standard error, as if places were independent; ``equal`` the share of places
    with the same best token; ``lost`` the share of the attention on cold tokens that selections
    miss, exactly; ``rows`` the share of cold rows that are read. ``lost_of_all`` is the share of
    all attention that is not computed exactly, ``estimated`` what the index says it is; None where
    it says nothing. ``step_bytes`` and ``full_bytes`` are means of ``Usage``'s, at the ends.

    Args:
        readers: of the contexts, which they have read; they stay where they are.
        windows: ``[n]`` int64 each.
        step: tokens of a pass.
        changes: options of the cache from there on.

    Raises:
        ValueError: nothing was cold.
    """
    divergences, equal, lost, rows = [], [], [], []
    estimated, exact, usages = [], [], []
    for start, window in zip(readers, windows, strict=True):
        start.check_step(step)
        reader = start.fork(**changes, track_recall=True)
        cache = reader.cache
        assert isinstance(cache, RetrievalCache)
        pieces = tqdm(
            window[start.length :].split(step), leave=False, desc=reader.choice.name, mininterval=1
        )
        logits = torch.cat([reader.feed(piece, keep=len(piece)) for piece in pieces])
        given = logits.float().log_softmax(-1)
        usages.append(reader.usage())
        expected = expected_of(reader.model, window, start.length)
        divergences.append((expected.exp() * (expected - given)).sum(-1))
        equal.append(given.argmax(-1) == expected.argmax(-1))
        for layer in cache.retrieval_layers:
            counters = layer.counters
            lost += [1.0 - one.mass for one in counters.recalls]
            if counters.selected is not None:
                rows.append(int(counters.selected) / counters.cold_rows)
            shares = counters.lost_mass(), counters.exact_lost_mass()
            if shares[0] is not None and shares[1] is not None:
                estimated.append(shares[0])
                exact.append(shares[1])
    if not lost:
        raise ValueError(
            "nothing was cold: take a longer --context, or flat:dense_below=0:recent=64"
        )
    all_places = torch.cat(divergences).double()
    return {
        "kl": float(all_places.mean()),
        "kl_error": float(all_places.std()) / math.sqrt(len(all_places)),
        "equal": float(torch.cat(equal).double().mean()),
        "lost": sum(lost) / len(lost),
        "rows": sum(rows) / len(rows),
        "lost_of_all": sum(exact) / len(exact) if exact else None,
        "estimated": sum(estimated) / len(estimated) if estimated else None,
        "step_bytes": sum(usage.step_bytes for usage in usages) / len(usages),
        "full_bytes": sum(usage.full_bytes for usage in usages) / len(usages),
    }
