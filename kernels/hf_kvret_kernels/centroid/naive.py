"""Centroid lists in plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

KeyChunks = Callable[[], Iterable[tuple[int, torch.Tensor]]]

# The scores of all keys by so many queries of one head are held together, or 4 MiB of them.
_QUERIES = 128
_MOST_HELD = 1 << 20
# Keys scored together: their scores by those queries stay in a processor's cache.
_KEYS = 1024
# For few centroids keys are read again and again, so often at most; for more they are copied.
_MOST_READINGS = 8
# Approximate entries of the tables in which ``unite`` marks tokens; 64 MiB.
MOST_MARKS = 1 << 24


def key_lists(
    queries: torch.Tensor, chunks: KeyChunks, count: int, scoring: Scoring
) -> Iterator[torch.Tensor]:
    """See ``hf_kvret_kernels.centroid.key_lists``."""
    B, H, C, G, _ = queries.shape
    n = scoring.valid.shape[1]
    scoring = replace(scoring, masked=not bool(scoring.valid.all()))
    held = max(_MOST_HELD, _QUERIES * n)
    few = min(C, held // max(1, B * H * G * n))
    if _MOST_READINGS * few >= C:
        memory = _memory(queries[:, :, :few], n, count)
        for first in range(0, max(1, C), max(1, few)):
            part = slice(first, min(first + few, C))
            yield _some_lists(queries[:, :, part], chunks(), count, scoring, memory)
        return
    keys = _collected(chunks, n)
    step = max(1, min(_QUERIES * n, held) // (G * n))
    memory = _memory(queries[:1, :1, :step], n, count)
    for first in range(0, C, step):
        part = slice(first, min(first + step, C))
        ids = queries.new_empty((B, H, part.stop - first, count), dtype=torch.int32)
        for b, h in itertools.product(range(B), range(H)):
            row, head = slice(b, b + 1), slice(h, h + 1)
            some, mine = queries[row, head, part], keys[row, head]
            own = replace(scoring, valid=scoring.valid[row])
            ids[row, head] = _some_lists(some, [(0, mine)], count, own, memory)
        yield ids


@dataclass(frozen=True, eq=False)
class Scoring:
    """How centroids and keys are compared, see ``key_lists``; ``masked``: some are not valid."""

    valid: torch.Tensor
    scale: float
    softcap: float | None
    masked: bool = True

    def mask_(self, scores: torch.Tensor, start: int) -> None:
        """Cap ``scores [B, H, c, G, P]`` of the slots from ``start`` on; -inf where masked."""
        soft_cap_(scores, self.softcap)
        if not self.masked:
            return
        mask = self.valid[:, None, start : start + scores.shape[-1]]
        scores.masked_fill_(~mask[:, None, :, None], float("-inf"))


def _collected(chunks: KeyChunks, n: int) -> torch.Tensor:
    """All keys ``[B, H, n, D]``, of the widest dtype among them."""
    result: torch.Tensor | None = None
    for start, keys in chunks():
        if result is None:
            result = keys.new_zeros(*keys.shape[:2], n, keys.shape[3])
        result = result.to(torch.promote_types(result.dtype, keys.dtype))
        result[:, :, start : start + keys.shape[2]] = keys
        # Freed before the next one is made.
        del keys
    assert result is not None, "there is a chunk where there are tokens"
    return result


def _memory(queries: torch.Tensor, n: int, count: int) -> torch.Tensor:
    """Room for scores of n keys by ``queries [B, H, c, G, D]``, and for the best of each group.

    It is used again and again, because new pages cost as much time as products.
    """
    groups, G = queries[..., 0, 0].numel(), queries.shape[3]
    return queries.new_empty(groups * (G * n + n + _tile(n, count)), dtype=torch.float32)


def _tile(n: int, count: int) -> int:
    """Keys of a tile, with which n / tile tiles and ``count`` tiles of keys are fewest numbers."""
    return max(1, math.isqrt(n // max(1, min(count, n))))


def _some_lists(
    queries: torch.Tensor,
    chunks: Iterable[tuple[int, torch.Tensor]],
    count: int,
    scoring: Scoring,
    memory: torch.Tensor,
) -> torch.Tensor:
    """``[B, H, c, count]`` int32: the lists of all ``queries [B, H, c, G, D]``.

    Every score is computed once and held in ``memory``, as is the largest weight of each key; see
    ``_memory``. The denominators are summed up beside the products.
    """
    B, H, c, G, _ = queries.shape
    n, device = scoring.valid.shape[1], queries.device
    rows = (queries.float() * scoring.scale).flatten(0, 1).flatten(1, 2)
    largest = torch.full((B, H, c, G, 1), -1e30, dtype=torch.float32, device=device)
    total, blocks = torch.zeros_like(largest), []
    for first, keys in _short(chunks):
        # Blocks lie one after the other: in rows of all keys a product would write far apart.
        span = memory[B * H * c * G * first :][: B * H * c * G * keys.shape[2]]
        products = span.view(*rows.shape[:2], keys.shape[2])
        torch.bmm(rows, keys.float().flatten(0, 1).mT, out=products)
        block = products.view(B, H, c, G, keys.shape[2])
        scoring.mask_(block, first)
        blocks.append((first, block))
        if G > 1 and block.numel():
            newer = torch.maximum(largest, block.amax(-1, keepdim=True))
            total *= (largest - newer).exp_()
            total += torch.sub(block, newer).exp_().sum(-1, keepdim=True)
            largest = newer
    lse = (largest + total.log_()).clamp_(min=-1e30)
    # Tiles of keys at equal distances: the best keys lie in the tiles whose best key is best.
    k = min(count, n)
    tile = _tile(n, count)
    relevance = memory[B * H * c * G * n :][: B * H * c * (-(-n // tile) * tile)]
    relevance = relevance.view(B, H, c, -(-n // tile) * tile)
    relevance[..., n:] = float("-inf")
    for first, block in blocks:
        best = block.squeeze(3) if G == 1 else torch.sub(block, lse).amax(3)
        relevance[..., first : first + block.shape[-1]] = best
    values, ids = _best_of_tiles(relevance, tile, k)
    ids = ids.int().masked_fill_(values == float("-inf"), -1)
    return torch.nn.functional.pad(ids, (0, count - k), value=-1)


def _best_of_tiles(relevance: torch.Tensor, tile: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of ``relevance [..., n]`` and their places, in order; n a multiple of ``tile``.

    Looks at n / tile + k * tile numbers in place of n.
    """
    if tile == 1:
        best = relevance.topk(k, dim=-1)
        return best.values, best.indices
    tiles = relevance.unflatten(-1, (tile, -1))
    chosen = tiles.amax(-2).topk(k, dim=-1, sorted=False).indices
    steps = torch.arange(tile, device=relevance.device) * tiles.shape[-1]
    places = (chosen.unsqueeze(-2) + steps.unsqueeze(-1)).flatten(-2)
    best = relevance.gather(-1, places).topk(k, dim=-1)
    return best.values, places.gather(-1, best.indices)


def _short(chunks: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """``chunks`` in parts of at most ``_KEYS`` keys."""
    for start, keys in chunks:
        for first in range(0, keys.shape[2], _KEYS):
            yield start + first, keys[:, :, first : first + _KEYS]
        # Freed before the next one is made.
        del keys


def similarity(
    query: torch.Tensor, centroids: torch.Tensor, inverse_lengths: torch.Tensor, largest: bool
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.similarity``."""
    dots = torch.matmul(query.float().transpose(2, 3), centroids.float().permute(0, 1, 3, 4, 2))
    cosines = dots * inverse_lengths.transpose(2, 3).unsqueeze(3)
    return cosines.amax(2) if largest else cosines.mean(2)


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
