"""The attention that tokens receive: sums of softmax weights over queries and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

# Scores that are held at once, over batch and heads; on a CPU they pass through its cache.
_SCORES = 1 << 24
_SCORES_CPU = 1 << 20


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries ``[B, Hq, q, D]`` of the slots from ``first`` on; ``valid [B, q]`` bool."""

    queries: torch.Tensor
    first: int
    valid: torch.Tensor

    def blocks(self, size: int) -> Iterator[tuple[slice, Asked]]:
        """Parts of at most ``size`` queries, and where they are among all."""
        for start in range(0, self.queries.shape[2], size):
            part = slice(start, start + size)
            yield part, Asked(self.queries[:, :, part], self.first + start, self.valid[:, part])


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys ``[B, Hkv, n, D]`` of the slots from ``first`` on.

    ``seen [B, Hkv or 1, n]`` bool: False for tokens that nothing attends to.
    """

    keys: torch.Tensor
    first: int
    seen: torch.Tensor

    def logits(self, asked: Asked, scale: float, softcap: float | None) -> torch.Tensor:
        """Attention logits ``[B, Hkv, G, q, n]`` fp32; -inf where a query does not see a key."""
        batch, query_heads, count, dim = asked.queries.shape
        heads, held = self.keys.shape[1:3]
        folded = (asked.queries.float() * scale).reshape(batch, heads, -1, dim)
        scores = folded @ self.keys.float().transpose(-1, -2)
        soft_cap_(scores, softcap)
        hidden = ~self.seen[:, :, None, None]
        if self.first + held > asked.first + 1:
            device = self.keys.device
            slots = torch.arange(self.first, self.first + held, device=device)
            own = torch.arange(asked.first, asked.first + count, device=device)
            hidden = hidden | (slots > own[:, None])
        scores = scores.view(batch, heads, query_heads // heads, count, held)
        return scores.masked_fill_(hidden, float("-inf"))


def received(
    asked: Asked,
    pieces: Callable[[], Iterator[Piece]],
    *,
    scale: float,
    softcap: float | None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """What each key receives of causal attention over all ``pieces``, in bounded memory.

    Keys are read twice: for the denominators, then for the weights, each time against some queries
    after the other, so that there are never ``[q, n]`` scores at once.

    Args:
        asked: the queries; those that are not valid give nothing, whatever stands in them.
        pieces: all keys, each time it is called.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.

    Yields:
        First slot and weights ``[B, Hkv, n]`` fp32 of each piece, summed over the valid queries
        and the heads of a group. A query that sees no key gives nothing.
    """
    batch, query_heads, count, _ = asked.queries.shape
    skipped = ~asked.valid
    # Zeros in place of what must not matter, as it may be NaN.
    queries = asked.queries.masked_fill(skipped[:, None, :, None], 0.0)
    asked = Asked(queries, asked.first, asked.valid)

    def logits_of(piece: Piece) -> Iterator[tuple[slice, torch.Tensor]]:
        for part, block in asked.blocks(_block_len(piece, batch * query_heads)):
            if block.first + block.queries.shape[2] > piece.first:
                yield part, piece.logits(block, scale, softcap)

    lse: torch.Tensor | None = None
    for piece in pieces():
        if lse is None:
            heads = piece.keys.shape[1]
            shape = batch, heads, query_heads // heads, count
            lse = queries.new_full(shape, float("-inf"), dtype=torch.float32)
        for part, logits in logits_of(piece):
            lse[..., part] = torch.logaddexp(lse[..., part], logits.logsumexp(-1))
    if lse is None:
        return
    # Where nothing is seen, and for padding, weights must be 0, not NaN.
    lse = lse.masked_fill(skipped[:, None, None] | (lse == float("-inf")), float("inf"))
    for piece in pieces():
        sums = lse.new_zeros(piece.keys.shape[:3])
        for part, logits in logits_of(piece):
            sums += logits.sub_(lse[..., part].unsqueeze(-1)).exp_().sum((2, 3))
        yield piece.first, sums


def received_by_few(
    asked: Asked, far: torch.Tensor, near: Piece, *, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a few queries, over chosen tokens with known logits and the newest ones.

    Args:
        asked: the queries.
        far: logits ``[B, Hq, q, m]`` fp32 of the chosen tokens, -inf for none.
        near: the newest tokens.
        scale: factor of the dot products.
        softcap: as in ``received``.

    Returns:
        Weights ``[B, Hkv, m]`` of the chosen and ``[B, Hkv, n]`` of the newest tokens, fp32.
    """
    newest = near.logits(asked, scale, softcap)
    chosen = far.unflatten(1, (newest.shape[1], -1))
    weights = torch.cat([chosen, newest], dim=-1).softmax(-1)
    sums = weights.masked_fill_(~asked.valid[:, None, None, :, None], 0.0).sum((2, 3))
    return sums[..., : far.shape[-1]], sums[..., far.shape[-1] :]


def _block_len(piece: Piece, heads: int) -> int:
    """How many queries meet the keys of a piece at once."""
    most = _SCORES_CPU if piece.keys.device.type == "cpu" else _SCORES
    return max(1, most // (heads * max(1, piece.keys.shape[2])))
