"""Attention of a decode step: sink, recent and selected cold tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_kvret.core.ahead import compiling_ahead
from hf_kvret.core.call import AttentionCall
from hf_kvret.core.counters import LayerCounters
from hf_kvret.core.exact_attention import attend_cold
from hf_kvret.core.host_step import attend_on_host
from hf_kvret.core.index import ColdTokens, Index
from hf_kvret.core.merge import merge
from hf_kvret.core.pieces import piece_len
from hf_kvret.core.recall import Recall, measure_recall
from hf_kvret.core.regions import Regions
from hf_kvret.core.store import AttentionResult
from hf_kvret_kernels.merge import Pieces
from hf_kvret_kernels.prompt_attention import prompt_pieces
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.step_attention import step_attention


def attend_selected(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    counters: LayerCounters,
    final_len: int = 0,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``counters`` are counted up; ``final_len`` as of ``compiling_ahead``. Returns
    ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
    """
    cold = regions.cold(call.scoring)
    index = None if cold is None else regions.ready_index(cold)
    selected = None if cold is None else counters.total(cold)
    step = attend_on_host(query, regions.window, index, cold, call, selected)
    if step is not None:
        out, host_ids = step
        if cold is not None and index is not None:
            _note_search(regions, index, query, host_ids, cold, counters)
            index.after_search(host_ids)
        return out
    if cold is None:
        return _attend_in_parts(regions, query, None, None, call, counters, selected)
    with compiling_ahead(regions, query, cold, call, final_len):
        return _attend_in_parts(regions, query, index, cold, call, counters, selected)


def _attend_in_parts(
    regions: Regions,
    query: torch.Tensor,
    index: Index | None,
    cold: ColdTokens | None,
    call: AttentionCall,
    counters: LayerCounters,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """See ``attend_selected``, part by part; ``selected`` is counted up."""
    finish_cold: Callable[[], AttentionResult] | None = None
    ids: torch.Tensor | None = None
    if cold is not None and index is None:
        finish_cold = partial(attend_all, regions, query, cold, counters)
    elif cold is not None and index is not None:
        ids = index.search(query, cold)
        _note_search(regions, index, query, ids, cold, counters)
        # First, so that a store elsewhere works while the device does all the rest.
        finish_cold = cold.store.begin(query, ids, cold.scale, cold.softcap)
        index.after_search(ids)
    keys, values = regions.window.tokens()
    # One query sees all that is held; there may be room behind it.
    offset = keys.shape[2] - query.shape[2] if query.shape[2] > 1 else None
    options: dict[str, Any] = {
        "scale": call.scoring.scale,
        "causal_offset": offset,
        "valid": regions.window.validity(call.scoring.valid),
        "softcap": call.scoring.softcap,
    }
    if isinstance(finish_cold, Pieces):
        # Launched already: one launch more does all that is left.
        options |= {"sink_logits": call.sink_logits, "ids": ids, "selected": selected}
        out, _ = step_attention(query, keys, values, finish_cold, **options)
        return out
    near = prompt_pieces(query, keys, values, **options)
    parts = [(near.outs, near.lses)]
    if ids is not None and selected is not None:
        count_ids(ids, selected)
    if finish_cold is not None:
        parts.append(finish_cold())
    out, _ = merge(parts, call.sink_logits, query.dtype)
    return out


def attend_all(
    regions: Regions, query: torch.Tensor, cold: ColdTokens, counters: LayerCounters
) -> AttentionResult:
    """Attention to all cold tokens, counted as selected."""
    window, count = regions.window, query.shape[2]
    heads = window.keys.shape[1]
    numbers = heads * (window.keys.shape[3] + window.values.shape[3])
    part = attend_cold(query, cold, piece_len(count, window.keys, numbers))
    counters.count(cold, len(query) * heads, count)
    counters.total(cold).add_(cold.valid.sum() * heads * count)
    if regions.config.track_recall:
        counters.recalls.append(Recall(overlap=1.0, mass=1.0, best_mass=1.0))
    return part


def _note_search(
    regions: Regions,
    index: Index,
    query: torch.Tensor,
    ids: torch.Tensor,
    cold: ColdTokens,
    counters: LayerCounters,
) -> None:
    batch, heads, count, _ = ids.shape
    counters.count(cold, batch * heads, count)
    changes = regions.config, regions.changes
    counters.count_candidates(index, changes, cold, batch * heads * count)
    if regions.config.track_recall:
        counters.recalls.append(measure_recall(query, ids, cold))
