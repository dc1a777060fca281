"""Merges attention over disjoint sets of tokens into attention over all of them, exactly.

Attention over a set is a pair ``(out, lse)``: the softmax-weighted mean of the values, and the
natural logarithm of the softmax's denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvret.contracts.store import AttentionResult
from hf_kvret_kernels.merge import merge_partials


def merge(
    parts: Sequence[AttentionResult],
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionResult:
    """``out [B, Hq, Q, Dv]`` in ``dtype`` and ``lse [B, Hq, Q]`` fp32 over all tokens of ``parts``.

    Sums are fp32. Where no part has a token, out is 0 and lse is -inf.

    Args:
        parts: at least one pair; all have the same shapes, but that one in S pieces is
            ``[B, Hq, Q, S, Dv]`` and ``[B, Hq, Q, S]``. A set without tokens has lse -inf.
        sink_logits: ``[Hq]`` learned attention sinks (GPT-OSS). Each is a token without a value
            whose logit joins the softmax. None for models that have none.
        dtype: of the merged ``out``.
    """
    outs, lses = zip(*parts, strict=True)
    return merge_partials(outs, lses, sink_logits=sink_logits, out_dtype=dtype)
