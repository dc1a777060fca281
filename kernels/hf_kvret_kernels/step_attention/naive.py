"""The end of a decode step's attention in plain torch, one operation after the other."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.merge.naive import merge_partials
from hf_kvret_kernels.prompt_attention.naive import prompt_attention
from hf_kvret_kernels.relevance.naive import count_ids
from hf_kvret_kernels.step_attention import NewToken


def step_attention(
    call: DenseCall,
    others: Partials,
    sink_logits: torch.Tensor | None,
    ids: torch.Tensor | None,
    selected: torch.Tensor | None,
    out_dtype: torch.dtype,
    new: NewToken | None = None,
    mean: MeanToken | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.step_attention.step_attention``."""
    if new is not None:
        call.key.index_copy_(2, new.column, new.key)
        call.value.index_copy_(2, new.column, new.value)
    if ids is not None and selected is not None:
        count_ids(ids, selected)
    parts = [prompt_attention(call, torch.float32), (others.outs, others.lses)]
    if mean is not None and ids is not None:
        parts.append(mean.attend(call.query, ids, call.scale, call.softcap))
    outs, lses = zip(*parts, strict=True)
    return merge_partials(outs, lses, sink_logits, out_dtype)
