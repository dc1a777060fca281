"""torch's flash attention on a CPU, which gives the log-sum-exp: what long passes run through.

Its matrix products are in the dtype of the tensors, sums are fp32, and softmax weights are rounded
to that dtype before they meet the values, as in transformers' ``sdpa``. The operator is private to
torch: ``fits`` is False where it is not there.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels.merge import naive as merge

FEWEST_QUERIES = 16
"""Below this many queries a call has too few rows for torch's blocks of 32 or more."""

_NAME = "_scaled_dot_product_flash_attention_for_cpu"


def fits(
    query: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None, softcap: float | None
) -> bool:
    """Whether these arguments of ``prompt_attention`` can go through the operator.

    It has no soft cap and one head dim, and ``valid`` must be one run of tokens in each sequence:
    padding on either side, no holes.
    """
    return (
        query.device.type == "cpu"
        and softcap is None
        and query.shape[2] >= FEWEST_QUERIES
        and query.shape[3] == value.shape[3]
        and hasattr(torch.ops.aten, _NAME)
        and (valid is None or _is_one_run(valid))
    )


def prompt_attention(call: DenseCall, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.prompt_attention.prompt_attention``; arguments for which ``fits``."""
    spans = _spans(call.valid, call.query.shape[0], call.key.shape[2])
    if len(set(spans)) == 1:
        return _attend(call, slice(None), *spans[0], out_dtype)
    pairs = [_attend(call, slice(b, b + 1), *span, out_dtype) for b, span in enumerate(spans)]
    outs, lses = zip(*pairs, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    call: DenseCall, sequences: slice, start: int, stop: int, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys from ``start`` to ``stop``, which are valid in all ``sequences``.

    Keys that every query sees are one call. Behind them is a triangle: key ``causal_offset + i`` is
    the newest that query i sees.
    """
    query, key, value = (rows[sequences] for rows in (call.query, call.key, call.value))
    scale, causal_offset = call.scale, call.causal_offset
    queries = query.shape[2]
    seen_by_all = stop if causal_offset is None else min(stop, max(start, causal_offset))
    parts = [_empty(query)]
    if start < seen_by_all:
        seen = slice(start, seen_by_all)
        parts.append(_flash(query, key[:, :, seen], value[:, :, seen], False, scale))
    if causal_offset is not None:
        corner = max(start, causal_offset)
        first = corner - causal_offset
        seen = slice(corner, min(stop, causal_offset + queries))
        if seen.start < seen.stop:
            out, lse = _empty(query)
            late = _flash(query[:, :, first:], key[:, :, seen], value[:, :, seen], True, scale)
            out[:, :, first:], lse[:, :, first:] = late
            parts.append((out, lse))
    if len(parts) == 2:
        out, lse = parts[1]
        return out.to(out_dtype), lse
    outs, lses = zip(*parts, strict=True)
    return merge.merge_partials(outs, lses, None, out_dtype)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    operator = getattr(torch.ops.aten, _NAME)
    return operator(query, key, value, 0.0, causal, scale=scale)


def _empty(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to nothing: 0, and a log-sum-exp of -inf."""
    out = torch.zeros_like(query)
    return out, query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)


def _is_one_run(valid: torch.Tensor) -> bool:
    """Whether no sequence of ``valid [B, T]`` has a hole between two valid tokens."""
    begins = valid[:, :1].sum(1) + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
    return bool((begins <= 1).all())


def _spans(valid: torch.Tensor | None, batch: int, tokens: int) -> list[tuple[int, int]]:
    """The first valid token of each sequence and the one behind the last; ``(0, 0)`` for none."""
    if valid is None:
        return [(0, tokens)] * batch
    first, count = valid.int().argmax(1), valid.sum(1)
    return [
        (start, start + length) if length else (0, 0)
        for start, length in zip(first.tolist(), count.tolist(), strict=True)
    ]
