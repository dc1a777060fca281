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
from hf_kvret.core.head_groups import HeadGroups
from hf_kvret.core.host_step import attend_on_host
from hf_kvret.core.index import ColdTokens, Index, blamed_on
from hf_kvret.core.merge import merge
from hf_kvret.core.pieces import piece_len
from hf_kvret.core.recall import Recall, measure_recall
from hf_kvret.core.regions import Regions
from hf_kvret.core.selection import selection
from hf_kvret.core.stand_ins import LayerOfModel, Search
from hf_kvret.core.store import AttentionResult
from hf_kvret.core.unselected import Choice, Lost, choose, estimates_wanted, stand_ins
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.merge import Pieces
from hf_kvret_kernels.prompt_attention import prompt_pieces
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.rest_tokens import RestTokens
from hf_kvret_kernels.step_attention import step_attention


def attend_selected(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    counters: LayerCounters,
    final_len: int = 0,
    layer: LayerOfModel | None = None,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``counters`` are counted up; ``final_len`` as of ``compiling_ahead``; ``layer`` None: the first
    one. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
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
    wants_estimates = estimates_wanted(regions, index, counters)
    looks_closer = wants_estimates or not regions.config.rest_kind.fused
    if (groups is None or call.sink_logits is None) and not looks_closer:
        rest = None
        if cold is not None and index is not None and regions.config.rest is not None:
            rest = regions.rest_sums(cold)
        step = attend_on_host(
            searching,
            regions.window,
            index,
            cold,
            call,
            selected,
            position_queries,
            None if rest is None else rest.means(),
        )
        if step is not None:
            out, host_ids = step
            if cold is not None and index is not None:
                number = 0 if layer is None else layer.number
                _note_search(regions, index, searching, host_ids, cold, counters, groups, number)
                index.after_search(host_ids)
            return out if groups is None else groups.unfold(out)
    layer = LayerOfModel() if layer is None else layer
    if cold is None:
        return _attend_in_parts(regions, query, call, counters, None, None, False)
    with compiling_ahead(regions, query, cold, call, final_len):
        if index is None:
            finish = partial(attend_all, regions, query, cold, counters, layer.number)
            return _attend_in_parts(regions, query, call, counters, None, finish, False)
        search = Search(regions, searching, index, cold, layer, groups)
        try:
            return _attend_in_parts(regions, query, call, counters, search, None, wants_estimates)
        except WrongIdError as error:
            raise blamed_on(index, "search", error) from error


def _attend_in_parts(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    counters: LayerCounters,
    search: Search | None,
    finish_cold: Callable[[], AttentionResult] | None,
    wants_estimates: bool,
) -> torch.Tensor:
    """See ``attend_selected``, part by part.

    ``search`` is made here, or ``finish_cold`` attends to the cold tokens, or there are none.
    """
    searching, groups = query, None
    # With one position to see and no logits of heads, groups stay queries up to the end.
    stays_folded = query.shape[2] == 1 and call.sink_logits is None
    choice: Choice | None = None
    selected: torch.Tensor | None = None
    rest_tokens: RestTokens | None = None
    lost: Lost | None = None
    if search is not None:
        searching, groups, cold = search.query, search.groups, search.cold
        selected = counters.total(cold)
        choice = choose(search, wants_estimates)
        ids = choice.ids
        number = search.layer.number
        _note_search(regions, search.index, searching, ids, cold, counters, groups, number)
        # First, so that a store elsewhere works while the device does all the rest.
        form = cold.scale, cold.softcap
        if choice.log_weights is None:
            finish_cold = cold.store.begin(searching, ids, *form)
        else:
            finish_cold = cold.store.begin_weighted(searching, ids, choice.log_weights, *form)
        search.index.after_search(ids)
        rest_tokens, lost = stand_ins(search, choice)
        if choice.part is not None:
            finish_cold = partial(_joined, finish_cold, choice.part)
        if rest_tokens is not None and (
            not isinstance(finish_cold, Pieces) or (groups is not None and not stays_folded)
        ):
            pieces = rest_tokens.pieces()
            finish_cold = partial(_joined, finish_cold, (pieces.outs, pieces.lses))
            rest_tokens = None
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
    chosen = None if choice is None else choice.ids
    if isinstance(finish_cold, Pieces):
        # Launched already: one launch more does all that is left.
        options |= {"sink_logits": call.sink_logits, "ids": chosen, "selected": selected}
        options["rest"] = rest_tokens
        out, lse = step_attention(searching, keys, values, finish_cold, **options)
    else:
        near = prompt_pieces(searching, keys, values, **options)
        parts = [(near.outs, near.lses)]
        if chosen is not None and selected is not None:
            count_ids(chosen, selected)
        if finish_cold is not None:
            parts.append(finish_cold())
        out, lse = merge(parts, call.sink_logits, query.dtype)
    if lost is not None:
        if groups is not None:
            lost = lost.unfolded(groups)
            lse = groups.unfold(lse) if stays_folded else lse
        counters.add_lost(*lost.shares(lse))
    return groups.unfold(out) if groups is not None and stays_folded else out


def _joined(finish: Callable[[], AttentionResult], others: AttentionResult) -> AttentionResult:
    """The result of ``finish``, with other tokens."""
    return merge([finish(), others])


def _unfolded(groups: HeadGroups, finish: Callable[[], AttentionResult]) -> AttentionResult:
    """The result of ``finish`` for folded queries, for the queries as they were."""
    out, lse = finish()
    return groups.unfold(out), groups.unfold(lse)


def attend_all(
    regions: Regions,
    query: torch.Tensor,
    cold: ColdTokens,
    counters: LayerCounters,
    number: int = 0,
) -> AttentionResult:
    """Attention to all cold tokens of the layer ``number``, counted as selected."""
    window, count = regions.window, query.shape[2]
    heads = window.keys.shape[1]
    numbers = heads * window.row_dim
    part = attend_cold(query, cold, piece_len(count, window.keys, numbers))
    counters.count(cold, len(query) * heads, count)
    counters.total(cold).add_(cold.valid.sum() * heads * count)
    if regions.config.track_recall:
        counters.recalls.append(Recall(overlap=1.0, mass=1.0, best_mass=1.0))
    for observer in counters.observers:
        observer(selection(number, query, cold, None, window))
    return part


def _note_search(
    regions: Regions,
    index: Index,
    query: torch.Tensor,
    ids: torch.Tensor,
    cold: ColdTokens,
    counters: LayerCounters,
    groups: HeadGroups | None,
    number: int,
) -> None:
    """Count a search, and tell those who watch the layer ``number``."""
    position_queries = 1 if groups is None else groups.count
    batch, heads, count, _ = ids.shape
    counters.count(cold, batch * heads * position_queries, count // position_queries)
    changes = regions.config, regions.changes
    counters.count_candidates(index, changes, cold, batch * heads * count)
    if regions.config.track_recall:
        counters.recalls.append(measure_recall(query, ids, cold))
    for observer in counters.observers:
        observer(selection(number, query, cold, ids, regions.window, groups))
