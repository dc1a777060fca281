"""A decode step of a layer on the CPU in one call, where index and store describe theirs."""

from __future__ import annotations

import torch

from hf_kvret.core.call import AttentionCall
from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.window import Window
from hf_kvret_kernels import host_step


def attend_on_host(
    query: torch.Tensor,
    window: Window,
    index: Index,
    cold: ColdTokens,
    call: AttentionCall,
    selected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    Returns ``out [B, Hq, Q, Dv]`` fp32 and the ids ``[B, Hkv, Q, budget]`` int32; None where the
    CPU library can't do this step, for the index or the store to do it. ``selected`` is an int64 to
    which their number is added, in place.
    """
    if not query.is_cpu or host_step.why_not():
        return None
    rows = cold.store.host_rows()
    if rows is None or query.dtype != rows.dtype:
        return None
    search = index.host_search(cold)
    if search is None:
        return None
    near = host_step.HostWindow(
        window.keys, window.values, window.sink + window.length, window.validity(call.scoring.valid)
    )
    return host_step.run_step(
        query,
        rows,
        search,
        near,
        cold.valid,
        cold.budget,
        scale=cold.scale,
        softcap=cold.softcap,
        sink_logits=call.sink_logits,
        selected=selected,
    )
