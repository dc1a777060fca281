"""Query heads that share one KV head, and what they lose when several select together.

Dimensions: H query heads, S heads a selection (the last one may have fewer), G selections, Q
queries, n tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple, Self

import torch

from hf_kvret.core.recall import exact_scores
from hf_kvret.evaluation.recording import RecordedLayer

POOLINGS = ("largest", "mean")
REAL, APART = "the model's", "with nothing in common"


def relevance(scores: torch.Tensor, size: int, pooling: str) -> torch.Tensor:
    """``[G, Q, n]``: how much tokens matter to the ``size`` heads that select together.

    Args:
        scores: ``[H, Q, n]`` fp32 logits, -inf for tokens that take no part.
        size: S.
        pooling: of the heads' softmax weights the ``"largest"``, as caches do, or the ``"mean"``,
            which holds the most mass when all heads attend to the same tokens.
    """
    shares = scores.softmax(dim=-1).split(size)
    pooled = [part.amax(0) if pooling == "largest" else part.mean(0) for part in shares]
    return torch.stack(pooled)


def token_ranks(pooled: torch.Tensor) -> torch.Tensor:
    """``[G, Q, n]`` int64: the place of each token in its selection's order, 0 the best."""
    order = pooled.argsort(dim=-1, descending=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


@dataclass(frozen=True, eq=False)
class Selections:
    """What some selections hold.

    Attributes:
        mass: ``[H]`` share of each head's attention on its selection, mean over queries.
        rows: of one selection, mean over queries.
        union: different rows of all selections, mean over queries.
        queries: that selected.
        count: G.
    """

    mass: torch.Tensor
    rows: float
    union: float
    queries: int
    count: int

    @classmethod
    def of_marks(cls, shares: torch.Tensor, marks: torch.Tensor, size: int) -> Self:
        """Of ``shares [H, Q, n]``, bool ``marks [G, Q, n]`` and S, the heads a selection."""
        heads = torch.arange(len(shares), device=marks.device)
        mass = (shares * marks[heads // size]).sum(-1).mean(-1)
        rows, union = marks.sum(-1).double().mean(), marks.any(0).sum(-1).double().mean()
        return cls(mass, float(rows), float(union), shares.shape[1], len(marks))

    @classmethod
    def mean(cls, found: Sequence[Self]) -> Self:
        """Over the queries of all of them."""
        queries = sum(one.queries for one in found)
        return cls(
            torch.stack([one.mass * one.queries for one in found]).sum(0) / queries,
            sum(one.rows * one.queries for one in found) / queries,
            sum(one.union * one.queries for one in found) / queries,
            queries,
            found[0].count,
        )


def select(
    shares: torch.Tensor, ranks: torch.Tensor, size: int, count: int, *, together: bool
) -> Selections:
    """The best tokens of each selection.

    Args:
        shares: ``[H, Q, n]`` softmax weights.
        ranks: of ``token_ranks``.
        size: S.
        count: rows, below n; of each selection, or ``together`` the most of their union: each
            selection then takes as many as keep it within that.
    """
    limit: int | torch.Tensor = count
    if together:
        # A row is in the union once the rank at which its first selection takes it is below k.
        limit = ranks.amin(0).sort(dim=-1).values[:, count, None]
    return Selections.of_marks(shares, ranks < limit, size)


def shuffled(scores: torch.Tensor, valid: torch.Tensor, seed: int) -> torch.Tensor:
    """``scores [H, Q, n]`` with the tokens of each head in an order of its own.

    What each head holds with a selection of its own stays as it was; what heads have in common is
    chance. Tokens that are not ``valid [Q, n]`` for all queries keep their places.
    """
    generator = torch.Generator().manual_seed(seed)
    free = valid.all(0).nonzero()[:, 0]
    mixed = scores.clone()
    for head in range(len(scores)):
        order = free[torch.randperm(len(free), generator=generator)]
        mixed[head][:, free] = scores[head][:, order]
    return mixed


def cold_mask(length: int, queries: int, sink: int, recent: int) -> torch.Tensor:
    """Bool ``[queries, length]``: tokens between sinks and window, for each of the last queries."""
    places = torch.arange(length)
    last = torch.arange(length - queries, length)[:, None]
    return (places >= sink) & (places <= last - recent)


def measured(layers: Sequence[Selections]) -> dict[str, Any]:
    """Means over layers as plain JSON values; ``worst`` is the head of any layer that holds least.

    ``heads`` has the mass of each head, by layer.
    """
    masses = torch.stack([one.mass for one in layers])
    return {
        "rows": fmean(one.rows for one in layers),
        "union": fmean(one.union for one in layers),
        "mass": float(masses.mean()),
        "worst": float(masses.min()),
        "selections": layers[0].count,
        "heads": masses.tolist(),
    }


def masses(
    texts: Iterable[Sequence[RecordedLayer]],
    queries: int,
    kept: tuple[int, int],
    sizes: Sequence[int],
    rows: Sequence[int],
    *,
    apart: bool,
) -> dict[str, Any]:
    """What the last ``queries`` of some texts hold by exact scores, as plain JSON values.

    ``cold`` is the share of all attention on tokens outside sinks and window, by layer and head.
    ``selections`` has an entry for each pooling, size, way to count rows and number of them, with
    the entries of ``measured``.

    Args:
        texts: the layers of each.
        queries: Q.
        kept: sinks, and newest tokens, which no query has to select.
        sizes: S.
        rows: of a selection, and of the union of all.
        apart: take from the heads what they have in common, see ``shuffled``.
    """
    found: dict[Way, dict[int, list[Selections]]] = {}
    cold: dict[int, list[torch.Tensor]] = {}
    for layers in texts:
        for layer in layers:
            scores = exact_scores(
                layer.queries[None, :, -queries:], layer.keys[None], layer.scale, layer.softcap
            )[0]
            visible = cold_mask(scores.shape[-1], queries, 0, 0)
            mask = cold_mask(scores.shape[-1], queries, *kept)
            whole = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
            scores.masked_fill_(~mask, float("-inf"))
            cold.setdefault(layer.layer, []).append((scores.logsumexp(-1) - whole).exp().mean(-1))
            if apart:
                scores = shuffled(scores, mask, seed=layer.layer)
            for way, held in _ways(scores, sizes, rows):
                found.setdefault(way, {}).setdefault(layer.layer, []).append(held)
    return {
        "cold": [torch.stack(cold[layer]).mean(0).tolist() for layer in sorted(cold)],
        "selections": [
            way._asdict() | measured([Selections.mean(own[layer]) for layer in sorted(own)])
            for way, own in found.items()
        ],
    }


class Way(NamedTuple):
    """How selections are made, and how long they are.

    Attributes:
        pooling: one of ``POOLINGS``.
        select_heads: S.
        of: what ``count`` rows are of, a ``"selection"`` or their ``"union"``.
        count: rows.
    """

    pooling: str
    select_heads: int
    of: str
    count: int


def _ways(
    scores: torch.Tensor, sizes: Sequence[int], rows: Sequence[int]
) -> Iterator[tuple[Way, Selections]]:
    shares = scores.softmax(-1)
    for size in sizes:
        # A head alone has nothing to pool.
        for pooling in POOLINGS[: 1 if size == 1 else None]:
            ranks = token_ranks(relevance(scores, size, pooling))
            for of in ("selection", "union"):
                for count in rows:
                    held = select(shares, ranks, size, count, together=of == "union")
                    yield Way(pooling, size, of, count), held
