"""Attention over the union of disjoint token sets, from attention over each of them.

Attention over a set is a pair: ``out``, the softmax-weighted mean of the values, and ``lse``, the
natural log of the softmax's denominator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvret_kernels._dispatch import check_no_grad, choose_backend, launching_on
from hf_kvret_kernels.merge import naive

__all__ = ["merge_partials"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def merge_partials(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    sink_logits: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out [B, Hq, Q, Dv]`` in ``out_dtype`` and ``lse [B, Hq, Q]`` fp32 of the union.

    Sums are fp32. Where every set is empty, out is 0 and lse -inf.

    Args:
        outs: one ``[B, Hq, Q, Dv]`` for each set, fp32, fp16 or bf16, finite.
        lses: one ``[B, Hq, Q]`` fp32 for each; -inf for an empty set.
        sink_logits: ``[Hq]`` floats, a learned token without value for each head whose logit
            joins the softmax (GPT-OSS); None for models without.
        out_dtype: fp32, fp16 or bf16.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: no set, shapes, dtypes or devices that do not fit, gradients.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outs and {len(lses)} lses: pass one of each for every set")
    first = outs[0]
    if first.ndim != 4:
        raise ValueError(f"outs[0] has shape {tuple(first.shape)}: pass [B, Hq, Q, Dv]")
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_no_grad(**{f"outs[{number}]": out, f"lses[{number}]": lse})
        _check(f"outs[{number}]", out, first.shape, first.device, _FLOATS)
        _check(f"lses[{number}]", lse, first.shape[:3], first.device, (torch.float32,))
    if sink_logits is not None:
        check_no_grad(sink_logits=sink_logits)
        _check("sink_logits", sink_logits, first.shape[1:2], first.device, _FLOATS)
    if out_dtype not in _FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: choose one of {_FLOATS}")
    if choose_backend(backend, first) == "naive":
        return naive.merge_partials(outs, lses, sink_logits, out_dtype)
    from hf_kvret_kernels.merge import triton

    with launching_on(first):
        return triton.merge_partials(outs, lses, sink_logits, out_dtype)


def _check(
    name: str,
    tensor: torch.Tensor,
    shape: torch.Size,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
) -> None:
    if tensor.shape != shape or tensor.device != device or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: pass "
            f"{tuple(shape)} on {device}, of {', '.join(map(str, dtypes))}"
        )
