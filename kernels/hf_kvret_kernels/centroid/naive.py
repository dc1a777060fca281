"""Centroid lists in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

Pieces = Callable[[], Iterable[tuple[int, torch.Tensor]]]


def top_keys(
    queries: torch.Tensor,
    pieces: Pieces,
    count: int,
    valid: torch.Tensor,
    positions: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    most_scores: int,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.top_keys``."""
    B, H, C, G, _ = queries.shape

    def scored() -> Iterator[tuple[int, slice, torch.Tensor]]:
        """First slot, which centroids, and their logits ``[B, H, c, G, P]``, -inf if masked."""
        for start, keys in pieces():
            P = keys.shape[2]
            k = keys.float().transpose(-1, -2).unsqueeze(2)
            slots = torch.arange(start, start + P, device=keys.device)
            step = max(1, most_scores // max(1, B * H * G * P))
            for first in range(0, C, step):
                part = slice(first, first + step)
                a = torch.matmul(queries[:, :, part].float(), k) * scale
                if softcap is not None:
                    a = softcap * torch.tanh(a / softcap)
                seen = valid[:, None, start : start + P]
                if positions is not None:
                    seen = seen & (slots <= positions[:, part, None])
                yield start, part, a.masked_fill(~seen[:, None, :, None], float("-inf"))

    lse = None
    if G > 1:
        lse = torch.full((B, H, C, G, 1), float("-inf"), device=queries.device)
        for _, part, a in scored():
            lse[:, :, part] = torch.logaddexp(lse[:, :, part], a.logsumexp(-1, keepdim=True))
        lse.clamp_(min=-1e30)

    values = torch.full((B, H, C, count), float("-inf"), device=queries.device)
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


def unite(ids: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.centroid.unite``."""
    n = valid.shape[1]
    # Stable, so that of equal ids the one named first stays.
    united, places = ids.sort(dim=-1, stable=True)
    keep = (united >= 0) & (united < n)
    keep[..., 1:] &= united[..., 1:] != united[..., :-1]
    flat = united.clamp(0, n - 1).long().flatten(1)
    keep &= valid.gather(1, flat).view(united.shape)
    return united.masked_fill(~keep, -1), places
