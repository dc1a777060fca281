"""Partial attention results and their exact merge by log-sum-exp.

Attention over a set of tokens is a pair: ``out``, the softmax-weighted mean of the values, and
``lse``, the log of the softmax's denominator. Two pairs over disjoint sets merge into the pair
over their union, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Partial(NamedTuple):
    """Attention over some tokens: ``out [B, Hq, Q, Dv]``, ``lse [B, Hq, Q]`` fp32, natural log."""

    out: torch.Tensor
    lse: torch.Tensor


def merge(parts: Sequence[Partial], sink_logits: torch.Tensor | None = None) -> Partial:
    """Attention over the union of disjoint token sets.

    Args:
        parts: at least one ``Partial``; all of one shape. An empty set has ``lse = -inf``.
        sink_logits: ``[Hq]`` learned attention sinks (GPT-OSS): a token without value whose
            logit joins the softmax; None for models without.

    Returns:
        ``Partial`` with fp32 ``out``. Where every part is empty, out is 0 and lse -inf.
    """
    lses = torch.stack([part.lse for part in parts])
    if sink_logits is not None:
        sinks = sink_logits.float().view(1, 1, -1, 1).expand(1, *lses.shape[1:])
        lses = torch.cat([lses, sinks])
    peak = lses.amax(dim=0)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    # Weights relative to the largest: large logits would lose digits in a difference to the sum.
    weights = (lses - peak).exp()
    mass = weights.sum(dim=0)
    out = torch.zeros_like(parts[0].out, dtype=torch.float32)
    for part, weight in zip(parts, weights, strict=False):
        out += weight.unsqueeze(-1) * part.out
    return Partial(out / mass.clamp(min=1.0).unsqueeze(-1), peak + mass.log())
