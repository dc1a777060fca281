"""Mean tokens: what stands for the cold tokens that a query does not select, in plain torch.

A mean token has the mean key and the mean value of all cold tokens of a KV head, and the weight of
as many of them as are left out: its logit is ``score(q, mean key) + log(n - k)``, with ``k`` of
``n`` tokens selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True, eq=False)
class MeanToken:
    """The mean of a KV head's tokens.

    Attributes:
        keys: ``[B, Hkv, 1, Dk]`` fp32.
        values: ``[B, Hkv, 1, Dv]`` fp32.
        counts: ``[B, 1]`` integers, of the tokens. A mean of none is finite.
    """

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor

    def attend(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of ``query [B, Hq, Q, Dk]`` to the mean of what ``ids`` leave out.

        ``ids [B, H, Q, K]`` are selected tokens, -1 for none; H is Hkv or a multiple of it.
        Returns ``out [B, Hq, Q, Dv]``, 0 where all are selected, and ``lse [B, Hq, Q]``, fp32.
        """
        heads, group = self.keys.shape[1], query.shape[1] // ids.shape[1]
        grouped = query.float().unflatten(1, (heads, -1)).flatten(2, 3)
        scores = soft_cap_(grouped @ self.keys.mT * scale, softcap).view(query.shape[:3])
        left = self.counts[:, None] - (ids >= 0).sum(dim=-1)
        lse = scores + left.clamp(min=0).log().repeat_interleave(group, dim=1)
        values = self.values.repeat_interleave(query.shape[1] // heads, dim=1)
        return values.masked_fill(lse.isneginf().unsqueeze(-1), 0.0), lse
