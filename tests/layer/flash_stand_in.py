"""Stands for flash-attn 2.8.3 on a CPU: what is passed to it, what it demands, what it returns.

Names are those of ``flash_attn/flash_attn_interface.py`` in the released source. What the
kernels refuse (``csrc/flash_attn/flash_api.cpp``) is an assertion here. The mask ends bottom right,
and a query that sees no key has ``out`` 0 and ``lse`` +inf.
"""

from typing import Any

import torch

from ..kernels.draws import attention64

calls: list[str] = []
"""Names of the functions that were called, and whether they were causal."""


def _check(q: Any, k: Any, v: Any) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert k.shape == v.shape and q.shape[-2] % k.shape[-2] == 0


def _one(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, softcap: float) -> Any:
    """``out [Q, Hq, D]`` and ``lse [Hq, Q]`` of one sequence."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    seen = seen.tril(len(k) - len(q)) if causal else seen
    rows = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    out, lse, _ = attention64(q.transpose(0, 1), *rows, seen, softmax_scale, softcap or None)
    return out.transpose(0, 1), lse.masked_fill(lse == float("-inf"), float("inf")).float()


def flash_attn_func(q: Any, k: Any, v: Any, *, return_attn_probs: bool, **options: Any) -> Any:
    """``[batch, seqlen, heads, dim]``, all of one length; lse ``[batch, heads, seqlen]``."""
    calls.append("dense causal" if options["causal"] else "dense")
    _check(q, k, v)
    assert q.ndim == k.ndim == 4 and len(q) == len(k)
    assert return_attn_probs
    results = [_one(*x, **options) for x in zip(q, k, v, strict=True)]
    outs, lses = zip(*results, strict=True)
    return torch.stack(outs).to(q.dtype), torch.stack(lses), None


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_attn_probs: bool,
    **options: Any,
) -> Any:
    """``[total, heads, dim]``, sequence b from ``cu_seqlens[b]`` on; lse ``[heads, total]``."""
    calls.append("varlen causal" if options["causal"] else "varlen")
    _check(q, k, v)
    assert q.ndim == k.ndim == 3
    assert return_attn_probs
    for starts, x, longest in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0
        assert starts[-1] == len(x) and 0 <= starts.diff().min() <= starts.diff().max() <= longest
    assert len(cu_seqlens_q) == len(cu_seqlens_k) and max_seqlen_q > 1
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for i in range(len(cu_seqlens_q) - 1):
        some = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        result = _one(q[some], k[keys], v[keys], **options)
        out[some], lse[:, some] = result[0].to(q.dtype), result[1]
    return out, lse, None
