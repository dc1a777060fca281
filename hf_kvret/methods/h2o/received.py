"""The attention that tokens receive: sums of softmax weights over queries and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

# Scores that are held at once, over batch and heads; on a CPU they pass through its cache.
_SCORES = 1 << 24
_SCORES_CPU = 1 << 20


class Queries(NamedTuple):
    """Queries ``[B, Hq, q, D]`` of the slots from ``first`` on, and how they meet keys."""

    rows: torch.Tensor
    first: int
    scale: float
    softcap: float | None


class Piece(NamedTuple):
    """Keys ``[B, Hkv, n, D]`` from slot ``first`` on; ``seen [B, Hkv or 1, n]``: not evicted."""

    keys: torch.Tensor
    first: int
    seen: torch.Tensor

    def logits(self, queries: Queries) -> torch.Tensor:
        """Attention logits ``[B, Hkv, G, q, n]`` fp32; -inf where a query does not see a key."""
        rows, (heads, count) = queries.rows, self.keys.shape[1:3]
        folded = (rows.float() * queries.scale).reshape(len(rows), heads, -1, rows.shape[3])
        scores = folded @ self.keys.float().transpose(-1, -2)
        soft_cap_(scores, queries.softcap)
        slots = torch.arange(self.first, self.first + count, device=rows.device)
        own = torch.arange(queries.first, queries.first + rows.shape[2], device=rows.device)
        hidden = ~self.seen[:, :, None, None] | (slots > own[:, None])
        scores = scores.unflatten(2, (-1, rows.shape[2]))
        return scores.masked_fill_(hidden, float("-inf"))

    def blocks(self, queries: Queries) -> Iterator[tuple[slice, torch.Tensor]]:
        """``logits`` of some queries after the other, and where these are among all."""
        most = _SCORES_CPU if self.keys.is_cpu else _SCORES
        size = max(1, most // (queries.rows[:, :, 0, 0].numel() * max(1, self.keys.shape[2])))
        for start in range(0, queries.rows.shape[2], size):
            part = slice(start, start + size)
            rows, first = queries.rows[:, :, part], queries.first + start
            if first + rows.shape[2] > self.first:
                yield part, self.logits(queries._replace(rows=rows, first=first))


def received(
    queries: Queries, valid: torch.Tensor, heads: int, pieces: Callable[[], Iterator[Piece]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """What each key receives of causal attention over all ``pieces``, which are read twice.

    Queries that are not ``valid [B, q]``, or see no key, give nothing. Yields the first slot of
    each piece and weights ``[B, heads, n]`` fp32, summed over queries and the heads of a group.
    """
    # Zeros in place of what must not matter, as it may be NaN.
    queries = queries._replace(rows=queries.rows.masked_fill(~valid[:, None, :, None], 0.0))
    shape = len(valid), heads, queries.rows.shape[1] // heads, valid.shape[1]
    lse = queries.rows.new_full(shape, float("-inf"), dtype=torch.float32)
    for piece in pieces():
        for part, logits in piece.blocks(queries):
            lse[..., part] = torch.logaddexp(lse[..., part], logits.logsumexp(-1))
    lse = lse.masked_fill(~valid[:, None, None] | (lse == float("-inf")), float("inf"))
    for piece in pieces():
        sums = lse.new_zeros(piece.keys.shape[:3])
        for part, logits in piece.blocks(queries):
            sums += logits.sub_(lse[..., part].unsqueeze(-1)).exp_().sum((2, 3))
        yield piece.first, sums


def received_by_few(
    queries: Queries, valid: torch.Tensor, far: torch.Tensor, near: Piece
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same at once, for tokens with logits ``far [B, Hq, q, m]`` fp32 and the newest ones."""
    newest = near.logits(queries)
    weights = torch.cat([far.unflatten(1, newest.shape[1:3]), newest], dim=-1).softmax(-1)
    sums = weights.masked_fill_(~valid[:, None, None, :, None], 0.0).sum((2, 3))
    return sums[..., : far.shape[-1]], sums[..., far.shape[-1] :]
