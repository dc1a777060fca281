"""The end of a decode step's attention in plain torch, one operation after the other."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import DenseCall
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.step_attention.step_attention``."""
    if new is not None:
        call.key.index_copy_(2, new.column, new.key)
        call.value.index_copy_(2, new.column, new.value)
    if ids is not None and selected is not None:
        count_ids(ids, selected)
    out, lse = prompt_attention(call, torch.float32)
    return merge_partials([out, others.outs], [lse, others.lses], sink_logits, out_dtype)
