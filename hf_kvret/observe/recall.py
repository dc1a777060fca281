"""Exact relevance of cold tokens: what an oracle selects, and how well an index does."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.layer.step import StepRecord, Subscriber
from hf_kvret.layer.window import Window
from hf_kvret_kernels.ids import check_id_range
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.soft_cap import soft_cap_


def exact_scores(
    query: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float | None = None
) -> torch.Tensor:
    """Attention logits ``[B, Hq, Q, n]`` fp32: ``query [B, Hq, Q, D]``, ``keys [B, Hkv, n, D]``."""
    batch, query_heads, count, dim = query.shape
    heads = keys.shape[1]
    folded = query.float().reshape(batch, heads, query_heads // heads * count, dim)
    scores = folded @ keys.float().transpose(-1, -2) * scale
    return soft_cap_(scores, softcap).view(batch, query_heads, count, -1)


class Recall(NamedTuple):
    """Quality of one selection, means over batch, heads and queries.

    ``overlap``: share of the exact top-k that was selected. ``mass``: share of the attention
    mass on cold tokens that the selected ones hold; ``best_mass``: of the exact top-k.
    ``lost_mass``: share of all attention, window included, on cold tokens that were not selected.
    """

    overlap: float
    mass: float
    best_mass: float
    lost_mass: float


class RecallMeter(Subscriber):
    """Compares every selection of a layer with the exact top-k: ``track_recall``, for study.

    Attributes:
        recalls: of the steps so far.
    """

    capture_obstacle = "track_recall=True reads all keys at every step, for study"

    def __init__(self) -> None:
        self.recalls: list[Recall] = []

    def __call__(self, record: StepRecord) -> None:
        """Measure a step."""
        if record.ids is None:
            recall = Recall(overlap=1.0, mass=1.0, best_mass=1.0, lost_mass=0.0)
        else:
            window = window_lse(record.query, record.kv.window, record.call)
            recall = measure_recall(record.query, record.ids, record.cold, window)
        self.recalls.append(recall)

    def reset(self) -> None:
        """Forget the steps so far."""
        self.recalls = []

    def means(self) -> dict[str, float]:
        """Means over the steps, as entries of ``cache.stats()``; empty before the first step."""
        if not self.recalls:
            return {}
        overlap, mass, best_mass, lost_mass = map(fmean, zip(*self.recalls, strict=True))
        return {
            "recall_overlap": overlap,
            "recall_mass": mass,
            "recall_best_mass": best_mass,
            "lost_mass": lost_mass,
        }


def window_lse(query: torch.Tensor, window: Window, call: AttentionCall) -> torch.Tensor:
    """``[B, Hq, Q]`` fp32: log of the exponentiated logits of window and learned sinks, summed.

    ``query [B, Hq, Q, Dk]`` of the newest tokens, each of which sees those before it.
    """
    scoring, keys = call.scoring, window.tokens()[0]
    scores = exact_scores(query, keys, scoring.scale, scoring.softcap)
    length, queries = keys.shape[2], query.shape[2]
    seen = torch.ones(queries, length, dtype=torch.bool, device=keys.device)
    seen = seen.tril(length - queries)
    valid = window.validity(scoring.valid)
    if valid is not None:
        seen = seen & valid[:, None, None]
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    sinks = call.sink_logits
    return lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])


def measure_recall(
    query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens, window: torch.Tensor | None = None
) -> Recall:
    """Compare ``ids [B, H, Q, k]`` with the exact top-k. Reads every key of the store.

    ``window [B, Hq, Q]`` as of ``window_lse``; None: there are cold tokens alone.
    """
    chunks = [
        exact_scores(query, keys, cold.scale, cold.softcap) for _, keys in cold.store.key_chunks()
    ]
    # Never to be selected are those that are not valid.
    scores = torch.cat(chunks, dim=-1).masked_fill(~cold.valid[:, None, None], float("-inf"))
    heads = ids.shape[1]
    relevance = group_relevance(scores, heads)
    best_values, best = relevance.topk(min(ids.shape[-1], relevance.shape[-1]), dim=-1)
    counted = best_values > float("-inf")
    chosen = _marks(ids, relevance)
    overlap = (chosen.gather(-1, best) & counted).sum() / counted.sum().clamp(min=1)
    shares = scores.softmax(dim=-1).nan_to_num()
    groups = scores.shape[1] // heads
    chosen = chosen.repeat_interleave(groups, dim=1)
    mass = (shares * chosen).sum(-1).mean()
    exact = _marks(best.masked_fill(~counted, -1), relevance).repeat_interleave(groups, dim=1)
    total = scores.logsumexp(-1)
    if window is not None:
        total = torch.logaddexp(total, window)
    lost = ((scores - total.unsqueeze(-1)).exp().nan_to_num() * ~chosen).sum(-1).mean()
    best_mass = (shares * exact).sum(-1).mean()
    return Recall(float(overlap), float(mass), float(best_mass), float(lost))


def _marks(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bool ``[B, H, Q, n]`` with True at ``ids``; -1 marks nothing, WrongIdError for others."""
    length = like.shape[-1]
    check_id_range(ids, length)
    marks = ids.new_zeros(*ids.shape[:-1], length + 1, dtype=torch.bool)
    return marks.scatter_(-1, ids.long().masked_fill(ids < 0, length), True)[..., :-1]
