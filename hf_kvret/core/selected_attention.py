"""Attention of a decode step: sink, recent and selected cold tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_kvret.core.call import AttentionCall
from hf_kvret.core.counters import LayerCounters
from hf_kvret.core.exact_attention import attend_cold
from hf_kvret.core.head_groups import HeadGroups
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
    regions: Regions, query: torch.Tensor, call: AttentionCall, counters: LayerCounters
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``counters`` are counted up. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
    """
    cold = regions.cold(call.scoring)
    index = None if cold is None else regions.ready_index(cold)
    selected = None if cold is None else counters.total(cold)
    groups = None
    if index is not None:
        heads = regions.window.keys.shape[1]
        groups = HeadGroups.of(regions.config.select_heads, heads, query.shape[1])
    searching = query if groups is None else groups.fold(query)
    # A group's queries see what those of any other group see at their position.
    position_queries = 1 if groups is None else groups.count
    if groups is None or call.sink_logits is None:
        step = attend_on_host(
            searching, regions.window, index, cold, call, selected, position_queries
        )
        if step is not None:
            out, host_ids = step
            if cold is not None and index is not None:
                _note_search(regions, index, searching, host_ids, cold, counters, position_queries)
                index.after_search(host_ids)
            return out if groups is None else groups.unfold(out)
    finish_cold: Callable[[], AttentionResult] | None = None
    ids: torch.Tensor | None = None
    if cold is not None and index is None:
        finish_cold = partial(attend_all, regions, query, cold, counters)
    elif cold is not None and index is not None:
        ids = index.search(searching, cold)
        _note_search(regions, index, searching, ids, cold, counters, position_queries)
        # First, so that a store elsewhere works while the device does all the rest.
        finish_cold = cold.store.begin(searching, ids, cold.scale, cold.softcap)
        index.after_search(ids)
    # With one position to see and no logits of heads, groups stay queries up to the end.
    stays_folded = query.shape[2] == 1 and call.sink_logits is None
    if groups is not None and finish_cold is not None and not stays_folded:
        finish_cold, searching = partial(_unfolded, groups, finish_cold), query
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
        out, _ = step_attention(searching, keys, values, finish_cold, **options)
    else:
        near = prompt_pieces(searching, keys, values, **options)
        parts = [(near.outs, near.lses)]
        if ids is not None and selected is not None:
            count_ids(ids, selected)
        if finish_cold is not None:
            parts.append(finish_cold())
        out, _ = merge(parts, call.sink_logits, query.dtype)
    return groups.unfold(out) if groups is not None and stays_folded else out


def _unfolded(groups: HeadGroups, finish: Callable[[], AttentionResult]) -> AttentionResult:
    """The result of ``finish`` for folded queries, for the queries as they were."""
    out, lse = finish()
    return groups.unfold(out), groups.unfold(lse)


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
    position_queries: int,
) -> None:
    batch, heads, count, _ = ids.shape
    counters.count(cold, batch * heads * position_queries, count // position_queries)
    changes = regions.config, regions.changes
    counters.count_candidates(index, changes, cold, batch * heads * count)
    if regions.config.track_recall:
        counters.recalls.append(measure_recall(query, ids, cold))
