"""Centroid lists in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

Pieces = Callable[[], Iterable[tuple[int, torch.Tensor]]]

# fp32 scores held at once where the caller does not say: 16 MiB.
_MOST_SCORES = 1 << 22
# Entries, about, of the tables in which ``unite`` marks tokens; 64 MiB.
MOST_MARKS = 1 << 24


def top_keys(
    queries: torch.Tensor,
    pieces: Pieces,
    count: int,
    valid: torch.Tensor,
    positions: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    most_scores: int | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.top_keys``."""
    B, H, C, G, _ = queries.shape
    most = most_scores or _MOST_SCORES

    def scored() -> Iterator[tuple[int, slice, torch.Tensor]]:
        """First slot, which centroids, and their logits ``[B, H, c, G, P]``, -inf if masked."""
        for start, keys in pieces():
            P = keys.shape[2]
            k = keys.float().transpose(-1, -2)
            slots = torch.arange(start, start + P, device=keys.device)
            step = max(1, most // max(1, B * H * G * P))
            for first in range(0, C, step):
                part = slice(first, first + step)
                rows = queries[:, :, part].float() * scale
                # One matrix of queries a head: torch would copy the keys for each centroid.
                a = torch.matmul(rows.flatten(2, 3), k).unflatten(2, (-1, G))
                if softcap is not None:
                    a = softcap * torch.tanh(a / softcap)
                seen = valid[:, None, start : start + P]
                if positions is not None:
                    seen = seen & (slots <= positions[:, part, None])
                yield start, part, a.masked_fill(~seen[:, None, :, None], float("-inf"))

    lse = None
    if G > 1:
        lse = torch.full((B, H, C, G, 1), float("-inf"), dtype=torch.float32, device=queries.device)
        for _, part, a in scored():
            lse[:, :, part] = torch.logaddexp(lse[:, :, part], a.logsumexp(-1, keepdim=True))
        lse.clamp_(min=-1e30)

    values = torch.full((B, H, C, count), float("-inf"), dtype=torch.float32, device=queries.device)
    ids = torch.full((B, H, C, count), -1, dtype=torch.int32, device=queries.device)
    for start, part, a in scored():
        shares = a if lse is None else a - lse[:, :, part]
        found = shares.amax(3)
        slots = torch.arange(start, start + a.shape[-1], dtype=torch.int32, device=a.device)
        best = torch.cat([values[:, :, part], found], dim=-1).topk(count)
        named = torch.cat([ids[:, :, part], slots.expand(found.shape)], dim=-1)
        values[:, :, part] = best.values
        ids[:, :, part] = named.gather(-1, best.indices)
    return ids.masked_fill_(values == float("-inf"), -1)


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
    places = torch.arange(M, dtype=torch.int32, device=ids.device)
    united = torch.empty_like(ids)
    # Queries that share a table of all tokens' first places; one row for each head at least.
    step = max(1, MOST_MARKS // max(1, B * H * n))
    for first in range(0, Q, step):
        some = ids[:, :, first : first + step]
        outside = (some < 0) | (some >= n)
        tokens = some.long().masked_fill(outside, 0)
        seen = valid.gather(1, tokens.flatten(1)).view(some.shape) & ~outside
        # Column n takes what names nothing.
        tokens = tokens.masked_fill(~seen, n)
        marks = torch.full((*some.shape[:3], n + 1), M, dtype=torch.int32, device=ids.device)
        marks.scatter_reduce_(3, tokens, places.expand(some.shape), "amin")
        seen &= marks.gather(3, tokens) == places
        united[:, :, first : first + step] = some.masked_fill(~seen, -1)
    return united
