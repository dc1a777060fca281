"""Priority sampling: a few tokens, with weights, that stand for all of them without bias.

Of tokens with sizes w, those with the k greatest w / u are drawn, u uniform in (0, 1), and count as
much as ``max(w, tau)``, where tau is the next greatest w / u. So large ones are always drawn and
count as they are, and any sum over the drawn ones has the sum over all as its expectation
(Duffield, Lund, Thorup: Priority sampling for estimation of arbitrary subset sums, 2007).
"""

from __future__ import annotations

import torch

from hf_kvret_kernels.top_k import top_k

_MASK = 0xFFFFFFFF


def uniforms(layer: int, *parts: torch.Tensor) -> torch.Tensor:
    """fp32 in (0, 1) for ``layer`` and each combination of the ``parts``, integers that broadcast.

    A hash of them, in integers: the same on every device, and in every order of work.
    """
    state: torch.Tensor | int = (layer + 1) * 0x9E3779B1 & _MASK
    for part in parts:
        state = _mixed((state + part.long() * 0x9E3779B1) & _MASK)
    assert isinstance(state, torch.Tensor), "there are parts"
    # Of 23 bits: of one bit more, the greatest would be rounded to 1.
    return ((state >> 9).float() + 0.5) * 2.0**-23


def priority_sample(
    log_sizes: torch.Tensor, draws: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places ``[B, H, Q, count]`` int32 that were drawn, and the logs of their weights, fp32.

    -1 stands for those that are missing, with a log weight of 0. Where ``count`` covers all, all
    log weights are 0.

    Args:
        log_sizes: ``[B, H, Q, n]`` fp32, -inf for tokens that take no part.
        draws: ``uniforms`` of the same shape.
        count: 1 or more.
    """
    priorities, length = log_sizes - draws.log(), log_sizes.shape[-1]
    places = top_k(priorities, min(count + 1, length))
    highest = priorities.gather(-1, places.clamp(min=0).long())
    highest = highest.masked_fill(places < 0, float("-inf"))
    if length <= count:
        threshold = torch.full_like(highest[..., :1], float("-inf"))
        places = torch.nn.functional.pad(places, (0, count - length), value=-1)
    else:
        threshold, last = highest.min(dim=-1, keepdim=True)
        # The last one takes the place of the one that goes.
        places = places.scatter(-1, last, places[..., -1:])[..., :count].contiguous()
    sizes = log_sizes.gather(-1, places.clamp(min=0).long())
    weights = (threshold - sizes).clamp(min=0.0).masked_fill(places < 0, 0.0)
    return places, weights


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits, held in int64, that spreads every bit (MurmurHash3's last step)."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _MASK
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _MASK
    return bits ^ (bits >> 16)
