"""How much of the attention a query leaves out, by an index's estimates of the logits."""

from __future__ import annotations

import torch

from hf_kvret.core.index import ColdTokens, Estimates
from hf_kvret.core.recall import exact_scores, slot_marks
from hf_kvret_kernels.rest_tokens import RestMeans


def left_out_logits(
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
        taken = taken.gather(-1, _places(estimates.ids, len(cold)))
    known = estimates.logits.unflatten(1, (heads, -1))
    known = known.masked_fill(taken.unsqueeze(2), float("-inf"))
    selected = (ids >= 0).sum(-1)
    free = (valid.sum(-1) - selected).unsqueeze(2) - (known > float("-inf")).sum(-1)
    sums = known.logsumexp(-1).flatten(1, 2)
    return sums, _mean_logits(query, free.flatten(1, 2), cold, means)


def valid_logits(estimates: Estimates, cold: ColdTokens) -> torch.Tensor:
    """The logits of ``estimates``, -inf for tokens that are not valid."""
    ids, logits = estimates.ids, estimates.logits
    if ids is None:
        return logits.masked_fill(~cold.valid[:, None, None], float("-inf"))
    # A place more, for ids of -1.
    marks = torch.nn.functional.pad(cold.valid, (0, 1))[:, None, None]
    marks = marks.expand(*ids.shape[:3], -1).gather(-1, _places(ids, len(cold)))
    grouped = logits.unflatten(1, (ids.shape[1], -1))
    return grouped.masked_fill(~marks.unsqueeze(2), float("-inf")).flatten(1, 2)


def unknown_logits(
    query: torch.Tensor, estimates: Estimates, cold: ColdTokens, means: RestMeans
) -> torch.Tensor:
    """The second of ``left_out_logits``, where all tokens without estimates are left out."""
    known = valid_logits(estimates, cold) > float("-inf")
    free = cold.valid.sum(-1)[:, None, None] - known.sum(-1)
    return _mean_logits(query, free, cold, means)


def exact_left_out(query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
    """What both of ``left_out_logits`` estimate together, ``[B, Hq, Q]`` fp32. Reads all keys."""
    heads, batch = ids.shape[1], len(query)
    taken = slot_marks(ids, len(cold))[..., :-1] | ~cold.valid[:, None, None]
    sums = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    for start, keys in cold.store.key_chunks():
        scores = exact_scores(query, keys.to(query.device), cold.scale, cold.softcap)
        part = taken[..., start : start + keys.shape[2]].unsqueeze(2)
        scores = scores.view(batch, heads, -1, *scores.shape[2:]).masked_fill(part, float("-inf"))
        sums = torch.logaddexp(sums, scores.logsumexp(-1).flatten(1, 2))
    return sums


def _mean_logits(
    query: torch.Tensor, free: torch.Tensor, cold: ColdTokens, means: RestMeans
) -> torch.Tensor:
    """``[B, Hq, Q]``: of ``free [B, Hq, Q]`` tokens that all have the mean key."""
    scores = exact_scores(query, means.keys, cold.scale, cold.softcap)[..., 0]
    return scores + free.clamp(min=0).log()


def _places(ids: torch.Tensor, length: int) -> torch.Tensor:
    """int64 ``ids``, with ``length`` for -1."""
    return ids.long().masked_fill(ids < 0, length)
