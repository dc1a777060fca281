"""Mean tokens: what stands for the tokens of a KV head that a query does not select."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_

# With a smaller spread of scores a regression would follow rounding errors.
LEAST_SPREAD = 1e-3


@dataclass(frozen=True, eq=False)
class MeanToken:
    """The mean of a KV head's tokens, and how their keys and values vary with the keys.

    Attributes:
        moments: ``[B, Hkv, 1 + Dk + Dv, Dk]`` fp32, contiguous: the mean key, and the covariances
            of the numbers of keys and of values with those of keys.
        values: ``[B, Hkv, 1, Dv]`` fp32, contiguous: the mean value.
        counts: ``[B, 1]`` int64, of the tokens. A mean of none is finite.
    """

    moments: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor

    def check(self, batch: int, heads: int, key_dim: int, value_dim: int) -> None:
        """ValueError where it is not for so many sequences and KV heads of these dims."""
        moments = 1 + key_dim + value_dim
        sizes = (batch, heads, moments, key_dim), (batch, heads, 1, value_dim), (batch, 1)
        wanted = list(zip(sizes, (torch.float32, torch.float32, torch.int64), strict=True))
        tensors = self.moments, self.values, self.counts
        own = [(tuple(x.shape), x.dtype) for x in tensors]
        if own != wanted or not all(x.is_contiguous() for x in tensors):
            raise ValueError(f"{own} of moments, values and counts: pass contiguous {wanted}")

    @property
    def packed(self) -> bytes:
        """The library's struct; its addresses are good as long as this object lives."""
        tensors = self.moments, self.values, self.counts
        return struct.pack("@3P", *(x.data_ptr() for x in tensors))

    def scores(
        self, query: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The scores of ``query [B, Hq, Q, Dk]`` with all tokens, by KV head and group, fp32.

        Returns their mean and variance ``[B, Hkv, G, Q, 1]``, and their covariance with the values
        ``[B, Hkv, G, Q, Dv]``. A soft cap is taken as straight around the mean.
        """
        heads, dim = self.moments.shape[1], query.shape[3]
        grouped = query.float().unflatten(1, (heads, -1))
        shape = (*grouped.shape[:4], -1)
        grouped = grouped.flatten(2, 3) * scale
        mean, *along = (grouped @ self.moments.mT).split([1, dim, self.values.shape[3]], dim=-1)
        mean = soft_cap_(mean, softcap)
        slope = 1.0 if softcap is None else 1 - (mean / softcap).square()
        to_keys, to_values = (x * slope for x in along)
        variance = (to_keys * grouped * slope).sum(-1, keepdim=True).clamp_(min=0.0)
        return mean.reshape(shape), variance.view(shape), to_values.view(shape)

    def attend(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``query [B, Hq, Q, Dk]`` to what ``ids`` leave out, estimated.

        ``ids [B, Hkv or Hq, Q, K]`` are selected tokens, -1 for none. They are taken as the k
        largest of n scores that have a normal distribution, with mean m and standard deviation s.
        The others lie below its quantile z of (n - k) / n. Their exponentials sum up to
        ``n exp(m + s^2 / 2) Phi(z - s)``, and by these weights their mean is
        ``m + s (s - phi(z - s) / Phi(z - s))``. Values follow by their regression on the scores.
        With equal scores this is a mean token that counts n - k times.

        Returns ``out [B, Hq, Q, Dv]``, 0 where all are selected, and ``lse [B, Hq, Q]``, fp32.
        """
        score, variance, shared = self.scores(query, scale, softcap)
        # Integers, divided, would take torch's default dtype.
        counts = self.counts[:, None, None].float()
        share = (ids >= 0).sum(-1, keepdim=True) / counts.clamp(min=1)
        # A head of a group may select for itself.
        share = share.clamp_(max=1.0).unflatten(1, (self.values.shape[1], -1))
        spread = variance.sqrt()
        bound = -torch.special.ndtri(share) - spread
        below = torch.special.log_ndtr(bound)
        lse = score + variance / 2 + counts.log().unsqueeze(-1) + below
        # phi / Phi, where neither underflows; logarithms in fp32 would lose it where scores spread.
        ratio = math.sqrt(2 / math.pi) / torch.special.erfcx(-bound * math.sqrt(0.5))
        out = self.values.unsqueeze(2) + (1 - ratio / spread.clamp(min=LEAST_SPREAD)) * shared
        return out.masked_fill(lse.isneginf(), 0.0).flatten(1, 2), lse.flatten(1, 2).squeeze(-1)
