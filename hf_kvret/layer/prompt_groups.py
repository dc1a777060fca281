"""A long prompt in groups of queries: each attends to near tokens and to blocks of earlier ones.

Some queries of a group, the probes, score all earlier keys. What is chosen for the group are the
blocks that hold the largest share of the attention of any probe and head of a KV head, and beside
them the first block. Attention over the near tokens and the chosen blocks is exact. Groups begin at
multiples of ``GROUP``, so passes that end there give the same cache as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import attend_dense, merge
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.options.config import PromptRecipe
from hf_kvret.stores.chunks import chunk_len
from hf_kvret_kernels.block_lse import block_lse

GROUP = 512
"""Queries that share a choice, and the tokens before them that they all attend to."""
BLOCK = 64
"""Tokens that are chosen together."""


@dataclass(eq=False)
class PromptPass:
    """A pass of a prompt over the tokens of a layer, the new ones last.

    Attributes:
        query: ``[B, Hq, Q, Dk]`` of the new tokens, as they attend to ``call.heads.expand``.
        keys: ``[B, Hkv, T, D]`` of all tokens; ``values`` likewise.
        call: of the attention; ``scoring.valid [B, T]``.
        recipe: how groups choose.
        end: length of the whole prompt, of which this may be a chunk.
        retrieved: groups so far that did not attend to everything, from a token to the one behind.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    call: AttentionCall
    recipe: PromptRecipe
    end: int

    def __post_init__(self) -> None:
        self.retrieved: list[tuple[int, int]] = []
        self.past = self.keys.shape[2] - self.query.shape[2]

    def attend(self) -> torch.Tensor:
        """``[B, Hq, Q, Dv]`` in the query's dtype."""
        outs, first, total = [], self.past, self.keys.shape[2]
        while first < total:
            last = min(total, (first // GROUP + 1) * GROUP)
            outs.append(self._attend_group(first, last))
            first = last
        return torch.cat(outs, dim=2)

    def _attend_group(self, first: int, last: int) -> torch.Tensor:
        near = max(0, first - GROUP) // BLOCK * BLOCK
        query = self.query[:, :, first - self.past : last - self.past]
        count = self._count(first, near)
        if last > self.end - self.recipe.exact or not count:
            results = [self._attend_span(query, first, span) for span in self._spans(0, last)]
        else:
            blocks = self._choose(first, last, near, count)
            results = [self._attend_span(query, first, span) for span in self._spans(near, last)]
            most = self._most_tokens()
            some = blocks.split(count + 1 if most is None else max(1, most // BLOCK), dim=2)
            results += [self._attend_some(query, chosen) for chosen in some]
            self.retrieved.append((first, last))
        return merge(results, self.call.sink_logits, query.dtype)[0]

    def _count(self, first: int, near: int) -> int:
        """Blocks that a KV head chooses before ``near``; 0 where the budget covers them all.

        It is the same for all sequences: that of the one with most valid tokens.
        """
        valid, before, blocks = self.call.scoring.valid, first, near // BLOCK
        if valid is not None:
            before = int(valid[:, :first].sum(1).max())
            blocks = int(valid[:, :near].unflatten(1, (-1, BLOCK)).any(2).sum(1).max())
        count = -(-self.recipe.budget(before) // BLOCK)
        return count if count < blocks else 0

    def _spans(self, start: int, last: int) -> Iterator[slice]:
        """The tokens from ``start`` to ``last``, as many at a time as may be made of rows."""
        step = self._most_tokens() or last - start
        for begin in range(start, last, step):
            yield slice(begin, min(begin + step, last))

    def _most_tokens(self) -> int | None:
        """Tokens whose keys and values may be made at once; None where they exist."""
        if not self.call.heads.makes_rows:
            return None
        return chunk_len(
            GROUP, self.keys, self.call.heads.expanded_elements(self.keys, self.values)
        )

    def _attend_span(self, query: torch.Tensor, first: int, span: slice) -> AttentionResult:
        """Causal attention of the group that begins at ``first`` to the tokens of ``span``."""
        scoring = self.call.scoring
        valid = None if scoring.valid is None else scoring.valid[:, span]
        rows = self.call.heads.expand(self.keys[:, :, span], self.values[:, :, span])
        return attend_dense(query, *rows, scoring.of(valid), causal_offset=first - span.start)

    def _attend_some(self, query: torch.Tensor, blocks: torch.Tensor) -> AttentionResult:
        """Attention to the tokens of ``blocks [B, Hkv, n]``, which all queries see."""
        batch, heads, _ = blocks.shape
        keys, values = (_gather_blocks(rows, blocks) for rows in (self.keys, self.values))
        scoring, valid = self.call.scoring, None
        if scoring.valid is not None:
            last = scoring.valid.shape[1] // BLOCK * BLOCK
            by_block = scoring.valid[:, None, :last].unflatten(2, (-1, BLOCK))
            index = blocks.unsqueeze(3).expand(-1, -1, -1, BLOCK)
            valid = by_block.expand(-1, heads, -1, -1).gather(2, index).flatten(2).flatten(0, 1)
        # The blocks of a KV head, and which of their tokens are valid, are its own: each head is a
        # sequence of its own.
        folded = query.unflatten(1, (heads, -1)).flatten(0, 1)
        rows = self.call.heads.expand(keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None])
        out, lse = attend_dense(folded, *rows, scoring.of(valid))
        return tuple(part.unflatten(0, (batch, heads)).flatten(1, 2) for part in (out, lse))

    def _choose(self, first: int, last: int, near: int, count: int) -> torch.Tensor:
        """``[B, Hkv, count + 1]`` blocks before ``near``, in order.

        One more is a sequence's first block with valid tokens.
        """
        probes, slots = self._probes(first, last)
        relevance = self._shares(probes, slots, near, last).amax(2)
        valid = self.call.scoring.valid
        first_block = torch.zeros_like(slots[:, 0])
        if valid is not None:
            first_block = (valid.int().argmax(1) // BLOCK).clamp(max=near // BLOCK - 1)
        index = first_block[:, None, None].expand(-1, relevance.shape[1], 1)
        relevance.scatter_(2, index, float("inf"))
        return relevance.topk(count + 1, dim=2).indices.sort(dim=2).values

    def _probes(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probes ``[B, Hq, P, D]`` of a group, as rows are compared with them, and their slots.

        They are evenly spaced among the valid queries, of which the last is always one. Slots are
        ``[B, P]``.
        """
        query = self.query[:, :, first - self.past : last - self.past]
        count = last - first
        if self.recipe.probes != "all":
            count = min(self.recipe.probes, count)
        ranks = torch.arange(1, count + 1, device=query.device)
        valid = self.call.scoring.valid
        if valid is None:
            slots = ((ranks * (last - first) - 1) // count).expand(len(query), -1)
        else:
            order = valid[:, first:last].cumsum(1)
            ranks = (ranks * order[:, -1:] + count - 1) // count
            slots = torch.searchsorted(order, ranks.clamp(min=1)).clamp(max=last - first - 1)
        index = slots[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return self.call.heads.absorb(query.gather(2, index)), first + slots

    def _shares(
        self, probes: torch.Tensor, slots: torch.Tensor, near: int, last: int
    ) -> torch.Tensor:
        """``[B, Hkv, G * P, near / BLOCK]``: of a probe's attention, the share on each block."""
        scoring, sinks = self.call.scoring, self.call.sink_logits
        lse = block_lse(
            probes,
            self.keys[:, :, :last],
            slots,
            scale=scoring.scale,
            block=BLOCK,
            valid=None if scoring.valid is None else scoring.valid[:, :last],
            softcap=scoring.softcap,
        )
        total = lse.logsumexp(3)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        shares = (lse[..., : near // BLOCK] - total.unsqueeze(3)).exp().nan_to_num_(0.0)
        return shares.unflatten(1, (self.keys.shape[1], -1)).flatten(2, 3)


def _gather_blocks(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``[B, Hkv, n * BLOCK, D]`` of ``rows [B, Hkv, T, D]`` and ``blocks [B, Hkv, n]``.

    Head by head: ``gather`` over all of them takes ten times as long.
    """
    length = rows.shape[2] // BLOCK * BLOCK
    by_block = rows[:, :, :length].unflatten(2, (-1, BLOCK))
    picked = [
        torch.stack([own.index_select(0, ids) for own, ids in zip(*pair, strict=True)])
        for pair in zip(by_block, blocks, strict=True)
    ]
    return torch.stack(picked).flatten(2, 3)
