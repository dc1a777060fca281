"""Decode steps of ``dense-cpp``: all rows of a cache, read by the C++ kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret_kernels.host_step import HostWindow, run_step

_NAME = "hf_kvret_dense_cpp"


def attend_to_all(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: C++ for one query without a mask, sdpa for a prompt.

    Shapes as of ``sdpa_attention_forward``; keys and values are views ``[:, :, :n]`` of buffers.

    Raises:
        ValueError: a soft cap or learned sinks, which sdpa would leave out of the prompt.
    """
    special = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if special:
        raise ValueError(f"dense-cpp: this model's attention has {special[0]}; use full or static")
    if query.shape[2] > 1 or attention_mask is not None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out, None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = run_step(query, HostWindow(key, value, key.shape[2]), scale=scale, dtype=query.dtype)
    return out.transpose(1, 2).contiguous(), None


@contextmanager
def reading_with_cpp(model: PreTrainedModel) -> Iterator[None]:
    """``model`` with ``attend_to_all`` for its attention."""
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend_to_all)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
