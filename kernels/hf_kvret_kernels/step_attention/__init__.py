"""The end of a decode step's attention: the window, merged with what was selected elsewhere.

One launch on a GPU. Dimensions: B batch, Hq query heads, Hkv KV heads, Q queries at once, S chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvret_kernels._dispatch import FLOATS, DenseCall, check_no_grad, check_tensor, run
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials

__all__ = ["NewToken", "step_attention", "step_unchecked"]


class NewToken(NamedTuple):
    """A token whose row is not yet where the others are.

    Attributes:
        key, value: ``[B, Hkv, 1, D]``, its row.
        column: ``[1]`` int64, the token among those attended to that it becomes.
    """

    key: torch.Tensor
    value: torch.Tensor
    column: torch.Tensor


def step_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Partials,
    *,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    new: NewToken | None = None,
    mean: MeanToken | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to dense keys, and to other tokens, to which attention is known already.

    Args:
        query, key, value, scale, causal_offset, valid, softcap: as of ``prompt_attention``.
        others: of the same queries over the other tokens. Its tickets are counted in, and zeros
            again in the end: no other kernel may use them at the same time.
        sink_logits: ``[Hq]`` floats, a learned token without value for each head whose logit joins
            the softmax (GPT-OSS); None for models without.
        ids: int32 or int64 of any shape, or None.
        selected: int64 of one element, to which the number of ``ids`` that are not -1 is added, in
            place; None exactly where ``ids`` is.
        out_dtype: fp32, fp16 or bf16; None means the query's.
        new: a token that is written to ``key`` and ``value``, in place, before they are attended
            to; None: all are there.
        mean: of tokens of which those that ``ids [B, Hkv or Hq, Q, K]`` leave out count by it.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Returns:
        ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]`` fp32 (natural log). A query without any token
        has out 0 and lse -inf. Softmax, merge and sums are fp32; the Triton kernel rounds softmax
        weights of the dense keys to the input dtype before they meet the values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        ImportError: ``"triton"`` without Triton.
    """
    call = DenseCall(query, key, value, scale, causal_offset, valid, softcap).check()
    out_dtype = query.dtype if out_dtype is None else out_dtype
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: choose one of {FLOATS}")
    _check_others(others, query, value)
    if sink_logits is not None:
        check_no_grad(sink_logits=sink_logits)
        check_tensor("sink_logits", sink_logits, query.shape[1:2], FLOATS, query.device)
    _check_counting(ids, selected, query.device)
    if new is not None:
        for name, row, side in (("new.key", new.key, key), ("new.value", new.value, value)):
            check_tensor(name, row, (*side.shape[:2], 1, side.shape[3]), (side.dtype,), side.device)
        check_tensor("new.column", new.column, (1,), (torch.int64,), query.device)
    if mean is not None:
        _check_mean(mean, query, value, ids)
    more = sink_logits, ids, selected, out_dtype, new, mean
    return run(__name__, "step_attention", backend, call, others, *more, on=query)


def step_unchecked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Partials,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    ids: torch.Tensor | None,
    selected: torch.Tensor | None,
    out_dtype: torch.dtype,
    new: NewToken | None = None,
    mean: MeanToken | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``step_attention`` for a caller whose tensors fit each other by how they were made."""
    call = DenseCall(query, key, value, scale, causal_offset, valid, softcap)
    more = sink_logits, ids, selected, out_dtype, new, mean
    return run(__name__, "step_attention", backend, call, others, *more, on=query)


def _check_others(others: Partials, query: torch.Tensor, value: torch.Tensor) -> None:
    queries, device = query.shape[:3], query.device
    outs, lses, tickets = others.outs, others.lses, others.tickets
    check_no_grad(outs=outs, lses=lses)
    splits = lses.shape[-1:]
    if lses.ndim != 4 or splits == (0,):
        raise ValueError(
            f"others.lses has shape {tuple(lses.shape)}: pass [B, Hq, Q, S], S 1 or more"
        )
    check_tensor("others.lses", lses, queries + splits, (torch.float32,), device)
    check_tensor("others.outs", outs, queries + splits + value.shape[3:], (torch.float32,), device)
    if tickets is not None:
        check_tensor("others.tickets", tickets, queries, (torch.int32,), device)
        if not tickets.is_contiguous():
            raise ValueError(
                f"others.tickets has strides {tickets.stride()}: pass contiguous zeros, or None"
            )


def _check_counting(
    ids: torch.Tensor | None, selected: torch.Tensor | None, device: torch.device
) -> None:
    if (ids is None) != (selected is None):
        raise ValueError("ids without selected, or selected without ids: pass both, or none")
    if ids is not None and selected is not None:
        check_tensor("ids", ids, ids.shape, (torch.int32, torch.int64), device)
        check_tensor("selected", selected, selected.shape, (torch.int64,), device)
        if selected.numel() != 1:
            raise ValueError(f"selected has shape {tuple(selected.shape)}: pass one number")


def _check_mean(
    mean: MeanToken, query: torch.Tensor, value: torch.Tensor, ids: torch.Tensor | None
) -> None:
    batch, query_heads, queries, key_dim = query.shape
    mean.check(batch, value.shape[1], key_dim, value.shape[3])
    shapes = [(batch, heads, queries) for heads in (value.shape[1], query_heads)]
    if ids is None or ids.ndim != 4 or ids.shape[:3] not in shapes:
        raise ValueError("a mean without ids [B, Hkv or Hq, Q, K]: pass those that were selected")
