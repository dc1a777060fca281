"""Mean tokens: what stands for the cold tokens that a query does not select, in plain torch.

A mean token has the mean key and the mean value of a block of tokens, and the weight of as many of
them as are left out: its logit is ``score(q, mean key) + log(n - k)``, with ``n`` tokens in the
block, ``k`` of them selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True, eq=False)
class BlockMeans:
    """Means of R blocks of a KV head's tokens.

    Attributes:
        keys: ``[B, Hkv, R, Dk]`` fp32.
        values: ``[B, Hkv, R, Dv]`` fp32.
        counts: ``[B, R]`` integers: tokens of each block. Means of none are finite.
        block_len: block r is of the tokens ``r * block_len .. (r + 1) * block_len``; None: there is
            one, of all of them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    block_len: int | None = None

    def attend(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``query [B, Hq, Q, Dk]`` to the means of what ``ids`` leave out.

        ``ids [B, H, Q, K]`` are selected tokens, -1 for none; H is Hkv or a multiple of it.
        Returns ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]``, fp32.
        """
        logits = self._logits(query, ids, scale, softcap)
        # A query that selects everything has no mean token.
        weights = logits.softmax(-1).nan_to_num_(0.0)
        heads = self.values.shape[1]
        out = weights.unflatten(1, (heads, -1)).flatten(2, 3) @ self.values
        return out.view(*query.shape[:3], -1), logits.logsumexp(-1)

    def _logits(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """``[B, Hq, Q, R]`` fp32, -inf where all tokens of a block are selected."""
        heads, group = self.keys.shape[1], query.shape[1] // ids.shape[1]
        grouped = query.float().unflatten(1, (heads, -1)).flatten(2, 3)
        scores = soft_cap_(grouped @ self.keys.mT * scale, softcap)
        left = self.counts[:, None, None] - self._selected_counts(ids)
        weights = left.clamp(min=0).log().repeat_interleave(group, dim=1)
        return scores.view(*query.shape[:3], -1) + weights

    def _selected_counts(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, R]`` int64: how many of ``ids [B, H, Q, K]`` lie in each block."""
        if self.block_len is None:
            return (ids >= 0).sum(dim=-1, keepdim=True)
        # Ids of no token count for a block more.
        end = self.counts.shape[1]
        blocks = torch.where(ids < 0, end, ids // self.block_len).long().clamp(max=end)
        counts = ids.new_zeros(*ids.shape[:-1], end + 1, dtype=torch.long)
        return counts.scatter_add_(-1, blocks, torch.ones_like(blocks))[..., :end]
