"""Centroid lists in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

KeyChunks = Callable[[], Iterable[tuple[int, torch.Tensor]]]

# Default number of fp32 scores in memory at once: 2 MiB.
_MOST_SCORES = 1 << 19
# Ids of lists made together, with as many scores: 4 MiB. Keys are read once per group of lists, so
# a group has at least the lists of _LEAST_QUERIES queries per head.
_MOST_IDS = 1 << 20
_LEAST_QUERIES = 64
# Keys scored together, and the least number of new keys that are merged into the lists together.
_KEYS = 512
_LEAST_NEW_KEYS = 2048
# Entries of lists and new keys ranked at once: about 2 MiB with their indices.
_MOST_ENTRIES = 1 << 17
# Few centroids have their scores of all keys held, 4 MiB of them; keys are read so often at most.
_MOST_HELD = 1 << 20
_MOST_READINGS = 4
# Approximate entries of the tables in which ``unite`` marks tokens; 64 MiB.
MOST_MARKS = 1 << 24


def key_lists(
    queries: torch.Tensor,
    chunks: KeyChunks,
    count: int,
    valid: torch.Tensor,
    positions: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    most_scores: int | None,
) -> Iterator[torch.Tensor]:
    """See ``hf_kvret_kernels.centroid.key_lists``."""
    scores = _Scores(queries, valid, positions, scale, softcap, most_scores or _MOST_SCORES)
    B, H, C, G, _ = queries.shape
    few = _MOST_HELD // max(1, B * H * G * valid.shape[1])
    if most_scores is None and _MOST_READINGS * few >= C:
        for first in range(0, max(1, C), max(1, few)):
            yield _lists_at_once(scores, chunks, slice(first, min(first + few, C)), count)
        return
    lse = None if G == 1 else _denominators(scores, chunks)
    width = count + min(max(count, _LEAST_NEW_KEYS), valid.shape[1])
    step = max(-(-_LEAST_QUERIES // G), _MOST_IDS // max(1, B * H * (count + width)))
    for first in range(0, max(1, C), step):
        yield _some_lists(scores, chunks, lse, slice(first, min(first + step, C)), count, width)


@dataclass(frozen=True, eq=False)
class _Scores:
    """Scores of centroids and keys, at most ``most`` at once; the rest as for ``key_lists``."""

    queries: torch.Tensor
    valid: torch.Tensor
    positions: torch.Tensor | None
    scale: float
    softcap: float | None
    most: int

    def of(
        self, start: int, keys: torch.Tensor, part: slice
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields slices of the centroids ``part``, with their logits ``[B, H, c, G, P]``.

        ``keys [B, H, P, D]`` of the slots from ``start`` on; -inf where a key is masked.
        """
        B, H, _, G, _ = self.queries.shape
        P = keys.shape[2]
        k = keys.float().transpose(-1, -2)
        key_mask = self.valid[:, None, start : start + P]
        slots = torch.arange(start, start + P, device=keys.device)
        step = max(1, self.most // max(1, B * H * G * P))
        for first in range(part.start, part.stop, step):
            some = slice(first, min(first + step, part.stop))
            rows = self.queries[:, :, some].float() * self.scale
            # One matrix of queries per head: otherwise torch copies the keys for each centroid.
            a = torch.matmul(rows.flatten(2, 3), k).unflatten(2, (-1, G))
            soft_cap_(a, self.softcap)
            score_mask = key_mask
            if self.positions is not None:
                score_mask = key_mask & (slots <= self.positions[:, some, None])
            yield some, a.masked_fill_(~score_mask[:, None, :, None], float("-inf"))


def _lists_at_once(scores: _Scores, chunks: KeyChunks, part: slice, count: int) -> torch.Tensor:
    """``[B, H, c, count]`` int32: the lists of the centroids ``part``, all scores held at once."""
    B, H, _, G, _ = scores.queries.shape
    shape = (B, H, part.stop - part.start, G, scores.valid.shape[1])
    device = scores.queries.device
    scores_of_all = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
    for start, keys in chunks():
        for some, a in scores.of(start, keys, part):
            here = slice(some.start - part.start, some.stop - part.start)
            scores_of_all[:, :, here, :, start : start + keys.shape[2]] = a
    if G > 1:
        scores_of_all -= scores_of_all.logsumexp(-1, keepdim=True).clamp_(min=-1e30)
    best = scores_of_all.amax(3).topk(min(count, shape[-1]), dim=-1)
    ids = best.indices.int().masked_fill_(best.values == float("-inf"), -1)
    return torch.nn.functional.pad(ids, (0, count - ids.shape[-1]), value=-1)


def _denominators(scores: _Scores, chunks: KeyChunks) -> torch.Tensor:
    """``[B, H, C, G, 1]`` fp32: log-sum-exp of the logits of each query over all keys."""
    queries = scores.queries
    shape = (*queries.shape[:4], 1)
    lse = torch.full(shape, float("-inf"), dtype=torch.float32, device=queries.device)
    for start, keys in _short(chunks):
        for part, a in scores.of(start, keys, slice(0, shape[2])):
            lse[:, :, part] = torch.logaddexp(lse[:, :, part], a.logsumexp(-1, keepdim=True))
    return lse.clamp_(min=-1e30)


def _some_lists(
    scores: _Scores,
    chunks: KeyChunks,
    lse: torch.Tensor | None,
    part: slice,
    count: int,
    width: int,
) -> torch.Tensor:
    """``[B, H, c, count]`` int32: the lists of the centroids ``part``.

    The relevance of new keys is collected behind that of the lists, up to ``width`` numbers.
    """
    device, lead = scores.queries.device, scores.queries.shape[:2]
    shape = (*lead, part.stop - part.start)
    relevance = torch.full((*shape, width), float("-inf"), dtype=torch.float32, device=device)
    ids = torch.full((*shape, count), -1, dtype=torch.int32, device=device)
    slots = torch.empty(width - count, dtype=torch.int32, device=device)
    new_keys = 0
    for start, keys in _short(chunks):
        P = keys.shape[2]
        if count + new_keys + P > width:
            _join(relevance, ids, slots[:new_keys], in_order=False)
            new_keys = 0
        columns = slice(count + new_keys, count + new_keys + P)
        for some, a in scores.of(start, keys, part):
            if lse is not None:
                a -= lse[:, :, some]
            here = slice(some.start - part.start, some.stop - part.start)
            relevance[:, :, here, columns] = a.amax(3)
        slots[new_keys : new_keys + P] = torch.arange(start, start + P, device=device)
        new_keys += P
    _join(relevance, ids, slots[:new_keys], in_order=True)
    return ids.masked_fill_(relevance[..., :count] == float("-inf"), -1)


def _join(
    relevance: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, *, in_order: bool
) -> None:
    """Merge the new keys ``slots`` into the lists; ``relevance`` and ``ids`` change in place."""
    count = ids.shape[-1]
    width = count + len(slots)
    step = max(1, _MOST_ENTRIES // max(1, width * ids.shape[0] * ids.shape[1]))
    for scores, lists in zip(relevance.split(step, 2), ids.split(step, 2), strict=True):
        best = scores[..., :width].topk(count, dim=-1, sorted=in_order)
        indices = best.indices
        result = lists.gather(-1, indices.clamp(max=count - 1))
        if len(slots):
            newer = slots[(indices - count).clamp_(min=0)]
            result = torch.where(indices < count, result, newer)
        lists.copy_(result)
        scores[..., :count] = best.values


def _short(chunks: KeyChunks) -> Iterator[tuple[int, torch.Tensor]]:
    """``chunks`` in parts of at most ``_KEYS`` keys."""
    for start, keys in chunks():
        for first in range(0, keys.shape[2], _KEYS):
            yield start + first, keys[:, :, first : first + _KEYS]
        # Freed before the next one is made.
        del keys


def similarity(
    query: torch.Tensor, centroids: torch.Tensor, inverse_norms: torch.Tensor
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.similarity``."""
    q = torch.nn.functional.normalize(query.float(), dim=-1)
    dots = torch.matmul(q.transpose(2, 3), centroids.float().permute(0, 1, 3, 4, 2))
    return (dots * inverse_norms.transpose(2, 3).unsqueeze(3)).amax(2)


def take_lists(low: torch.Tensor, high: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.take_lists``."""
    rho = low.shape[-1]
    flat = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, rho)
    ids = low.gather(2, flat).int() & 0xFFFF
    if high is not None:
        ids |= high.gather(2, flat).int() << 16
    return (ids - 1).view(*index.shape, rho)


def unite(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.unite``."""
    B, H, Q, M = ids.shape
    n = valid.shape[1]
    indices = torch.arange(M, dtype=torch.int32, device=ids.device)
    result = torch.empty_like(ids)
    # Queries per table of all tokens' first indices; at least one row for each head.
    step = max(1, MOST_MARKS // max(1, B * H * n))
    for first in range(0, Q, step):
        some = ids[:, :, first : first + step]
        outside = (some < 0) | (some >= n)
        tokens = some.long().masked_fill(outside, 0)
        mask = valid.gather(1, tokens.flatten(1)).view(some.shape) & ~outside
        # Invalid ids go to column n.
        tokens = tokens.masked_fill(~mask, n)
        marks = torch.full((*some.shape[:3], n + 1), M, dtype=torch.int32, device=ids.device)
        marks.scatter_reduce_(3, tokens, indices.expand(some.shape), "amin")
        mask &= marks.gather(3, tokens) == indices
        result[:, :, first : first + step] = some.masked_fill(~mask, -1)
    return result
