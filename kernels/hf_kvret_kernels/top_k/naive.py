"""The highest scores in plain torch."""

from __future__ import annotations

import torch


def top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.top_k.top_k``.

    Positions ascend, the missing ones are last; of equal scores the first are taken, as the other
    implementations do and ``topk`` does not. Nothing waits for the device.
    """
    level = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > level
    equal = (scores == level) & (scores > float("-inf"))
    spare = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= spare))
    places = (chosen.cumsum(-1) - 1).masked_fill_(~chosen, count)
    numbers = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    ids = places.new_full((*scores.shape[:-1], count + 1), -1, dtype=torch.int32)
    return ids.scatter_(-1, places, numbers.expand_as(scores))[..., :count].contiguous()
