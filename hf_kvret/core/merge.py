"""Partial attention results and their exact merge by log-sum-exp.

Attention over a set of tokens is a pair: ``out``, the softmax-weighted mean of the values, and
``lse``, the log of the softmax's denominator. Two pairs over disjoint sets merge into the pair
over their union, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_kvret_kernels.merge import merge_partials


class Partial(NamedTuple):
    """Attention over some tokens: ``out [B, Hq, Q, Dv]``, ``lse [B, Hq, Q]`` fp32, natural log."""

    out: torch.Tensor
    lse: torch.Tensor


def merge(
    parts: Sequence[Partial],
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Partial:
    """Attention over the union of disjoint token sets.

    Args:
        parts: at least one ``Partial``; all of one shape. An empty set has ``lse = -inf``.
        sink_logits: ``[Hq]`` learned attention sinks (GPT-OSS): a token without value whose
            logit joins the softmax; None for models without.
        dtype: of the result's ``out``; sums are fp32.

    Returns:
        ``Partial``. Where every part is empty, out is 0 and lse -inf.
    """
    outs, lses = zip(*parts, strict=True)
    return Partial(*merge_partials(outs, lses, sink_logits=sink_logits, out_dtype=dtype))
