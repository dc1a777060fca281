"""Missed mass: the share of the attention that a step leaves out, as its index estimates it."""

from __future__ import annotations

import torch

from hf_kvret.contracts.index import ColdTokens, Estimates, Index, makes_estimates
from hf_kvret.layer.head_groups import HeadGroups
from hf_kvret.layer.regions import Regions
from hf_kvret.observe.counters import LayerCounters
from hf_kvret.observe.recall import exact_scores, slot_marks
from hf_kvret_kernels.rest_tokens import RestMeans, RestTokens

MEASURED_STEPS = 16
"""With ``warn_lost_mass`` alone, one step in so many asks the index for estimates."""


def is_measured(regions: Regions, index: Index | None, counters: LayerCounters) -> bool:
    """Whether the missed mass of the next step is measured.

    For a warning alone one step in ``MEASURED_STEPS`` is enough, as on a CPU the estimates take
    much longer than the step. A captured step is always the same, so it is always measured.
    """
    config = regions.config
    if config.track_recall and makes_estimates(index):
        return True
    if config.warn_lost_mass is None:
        return False
    return regions.window.place is not None or counters.steps % MEASURED_STEPS == 0


def measure_missed_mass(
    counters: LayerCounters,
    regions: Regions,
    index: Index,
    query: torch.Tensor,
    ids: torch.Tensor,
    cold: ColdTokens,
    lse: torch.Tensor,
    rest: RestTokens | None = None,
    groups: HeadGroups | None = None,
) -> None:
    """Count the share of the attention that a step left out; with ``track_recall`` the exact one.

    Nothing is counted where the index has no estimates this time.

    Args:
        counters: changed in place.
        regions: of the layer.
        index: found the ids.
        query: ``[B, Hq, Q, Dk]`` of the search, folded where heads select in ``groups``.
        ids: ``[B, H, Q, K]`` int32 that the query attended to, -1 for none.
        cold: the tokens that were searched.
        lse: ``[B, Hq, Q]`` fp32 of all that was attended to, by the query's own heads.
        rest: what stood in the attention for the tokens that were left out, as ``query``.
        groups: of the query heads of a KV head; None: they select together.

    Raises:
        ValueError: a warning needs estimates, and there are none.
    """
    estimates = index.estimate(query, cold)
    if estimates is None:
        regions.config.check_estimates(False)
        return
    means = regions.rest_sums(cold).joint_means()
    logs = [torch.logaddexp(*missed_logits(query, estimates, ids, cold, means))]
    if regions.config.track_recall:
        logs.append(exactly_missed_logits(query, ids, cold))
    rest_lse = None if rest is None else rest.logits.logsumexp(-1)
    if groups is not None:
        logs = [groups.unfold(log) for log in logs]
        rest_lse = None if rest_lse is None else groups.unfold(rest_lse)
    counters.add_lost(*missed_shares(logs, lse, rest_lse))


def missed_shares(
    logs: list[torch.Tensor], lse: torch.Tensor, rest_lse: torch.Tensor | None
) -> list[torch.Tensor]:
    """Shares of the attention, 0 to 1, of tokens that were left out; all ``[B, Hq, Q]`` fp32.

    Args:
        logs: logs of the sums of their exponentiated logits.
        lse: of all that was attended to.
        rest_lse: the part of it that stood for them; None: nothing did.
    """
    if rest_lse is not None:
        lse = lse + torch.log1p(-(rest_lse - lse).clamp(max=0.0).exp())
    # NaN where there is nothing to attend to.
    return [(log - lse).sigmoid().nan_to_num(nan=0.0) for log in logs]


def missed_logits(
    query: torch.Tensor,
    estimates: Estimates,
    ids: torch.Tensor,
    cold: ColdTokens,
    means: RestMeans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logs of the sums of the exponentiated logits that are left out, ``[B, Hq, Q]`` fp32 each.

    First of those that have estimates, by these; then of the others, which all have the logit of
    the mean key. -inf where there are none.

    Args:
        query: ``[B, Hq, Q, Dk]``.
        estimates: of the cold tokens, for these queries.
        ids: ``[B, H, Q, K]`` int32 that the queries attend to, -1 for none.
        cold: the tokens.
        means: of all of them, one of each KV head.
    """
    heads = ids.shape[1]
    valid = cold.valid[:, None, None]
    # A place more, for ids of -1: as if it were selected.
    taken = slot_marks(ids, len(cold))
    taken[..., -1:].fill_(True)
    taken[..., :-1].logical_or_(~valid)
    if estimates.ids is None:
        taken = taken[..., :-1]
    else:
        places = estimates.ids.long().masked_fill(estimates.ids < 0, len(cold))
        taken = taken.gather(-1, places)
    known = estimates.logits.unflatten(1, (heads, -1))
    known = known.masked_fill(taken.unsqueeze(2), float("-inf"))
    selected = (ids >= 0).sum(-1)
    free = (valid.sum(-1) - selected).unsqueeze(2) - (known > float("-inf")).sum(-1)
    scores = exact_scores(query, means.keys, cold.scale, cold.softcap)[..., 0]
    others = scores + free.flatten(1, 2).clamp(min=0).log()
    return known.logsumexp(-1).flatten(1, 2), others


def exactly_missed_logits(query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
    """What both of ``missed_logits`` estimate together, ``[B, Hq, Q]`` fp32. Reads all keys."""
    heads, batch = ids.shape[1], len(query)
    taken = slot_marks(ids, len(cold))[..., :-1] | ~cold.valid[:, None, None]
    sums = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    for start, keys in cold.store.key_chunks():
        scores = exact_scores(query, keys.to(query.device), cold.scale, cold.softcap)
        part = taken[..., start : start + keys.shape[2]].unsqueeze(2)
        scores = scores.view(batch, heads, -1, *scores.shape[2:]).masked_fill(part, float("-inf"))
        sums = torch.logaddexp(sums, scores.logsumexp(-1).flatten(1, 2))
    return sums
