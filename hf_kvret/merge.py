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
    total = torch.logsumexp(lses, dim=0)
    if sink_logits is not None:
        total = torch.logaddexp(total, sink_logits.float().view(1, -1, 1))
    safe = total.masked_fill(total == float("-inf"), 0.0)
    out = torch.zeros_like(parts[0].out, dtype=torch.float32)
    for part in parts:
        out += (part.lse - safe).exp().unsqueeze(-1) * part.out
    return Partial(out, total)
