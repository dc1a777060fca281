"""Mean tokens: a query's scores with all cold tokens of a KV head, by moments, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True, eq=False)
class MeanToken:
    """The mean of a KV head's tokens, and how their keys and values vary with the keys.

    Attributes:
        keys: ``[B, Hkv, 1, Dk]`` fp32.
        values: ``[B, Hkv, 1, Dv]`` fp32.
        covariances: ``[B, Hkv, Dk, Dk + Dv]`` fp32, of keys with keys and with values.
        counts: ``[B, 1]`` integers, of the tokens. A mean of none is finite.
    """

    keys: torch.Tensor
    values: torch.Tensor
    covariances: torch.Tensor
    counts: torch.Tensor

    def scores(
        self, query: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The scores of ``query [B, Hq, Q, Dk]`` with all tokens, by KV head and group, fp32.

        Returns their mean and variance ``[B, Hkv, G, Q, 1]``, and their covariance with the values
        ``[B, Hkv, G, Q, Dv]``. A soft cap is taken as straight around the mean.
        """
        heads, dim = self.keys.shape[1], query.shape[3]
        grouped = query.float().unflatten(1, (heads, -1))
        shape = (*grouped.shape[:4], -1)
        grouped = grouped.flatten(2, 3) * scale
        mean = soft_cap_(grouped @ self.keys.mT, softcap)
        slope = 1.0 if softcap is None else 1 - (mean / softcap).square()
        along = grouped @ self.covariances * slope
        variance = (along[..., :dim] * grouped * slope).sum(-1, keepdim=True).clamp_(min=0.0)
        return mean.view(shape), variance.view(shape), along[..., dim:].view(shape)
