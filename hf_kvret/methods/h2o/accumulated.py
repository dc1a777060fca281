"""AccumulatedAttention: softmax weights that each token received, summed over all queries."""

from __future__ import annotations

import torch

from hf_kvret.contracts.token_buffer import TokenBuffer


class AccumulatedAttention(TokenBuffer):
    """Sums ``[B, Hkv, T]`` fp32; -inf once a token is evicted."""

    def start(self, keys: torch.Tensor, slot: int) -> None:
        """Drop the slots from ``slot`` on, then add the tokens of ``keys [B, Hkv, n, D]`` at 0."""
        self.put(keys.new_zeros(keys.shape[:3], dtype=torch.float32), slot)

    def add(self, slot: int, weights: torch.Tensor) -> None:
        """Add ``weights [B, Hkv, n]`` to the tokens from ``slot`` on."""
        self.writable()[:, :, slot : slot + weights.shape[2]] += weights

    def add_at(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``weights [B, Hkv, m]`` to the tokens ``ids [B, Hkv, m]``; -1 for none."""
        weights = weights.masked_fill(ids < 0, 0.0)
        self.writable().scatter_add_(2, ids.long().clamp(min=0), weights)

    def evict(self, tokens: torch.Tensor) -> None:
        """Evict ``tokens [B, Hkv, n]`` bool among the first n, permanently."""
        self.writable()[:, :, : tokens.shape[2]].masked_fill_(tokens, float("-inf"))
