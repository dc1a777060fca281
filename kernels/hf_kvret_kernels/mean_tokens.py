"""Mean tokens: a query's scores with all cold tokens of a KV head, by moments, in plain torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_


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
