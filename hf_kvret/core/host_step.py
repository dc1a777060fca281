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
    index: Index | None,
    cold: ColdTokens | None,
    call: AttentionCall,
    selected: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds in ``cold``.

    ``selected`` is an int64 to which the number of tokens found is added, in place.

    Returns:
        ``out [B, Hq, Q, Dv]`` fp32 and the ids ``[B, Hkv, Q, budget]`` int32. None where the CPU
        library can't do this step: it is not there, the device is another, or index or store do
        their part in Python.
    """
    if not query.is_cpu or query.dtype != window.keys.dtype or host_step.why_not():
        return None
    chosen = None
    if cold is not None:
        rows = cold.store.host_rows()
        search = None if index is None or rows is None else index.host_search(cold)
        if rows is None or search is None:
            return None
        chosen = host_step.HostCold(rows, search, cold.valid, cold.budget)
    valid = window.validity(call.scoring.valid)
    near = host_step.HostWindow(window.keys, window.values, window.sink + window.length, valid)
    return host_step.run_step(
        query,
        near,
        chosen,
        scale=call.scoring.scale,
        softcap=call.scoring.softcap,
        sink_logits=call.sink_logits,
        selected=selected,
    )
