"""Attention of a decode step: sink, recent and selected cold tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.contracts.pieces import piece_len
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.ahead import compiling_ahead
from hf_kvret.layer.call import AttentionCall
from hf_kvret.layer.exact_attention import attend_cold
from hf_kvret.layer.head_groups import HeadGroups
from hf_kvret.layer.host_step import attend_on_host
from hf_kvret.layer.merge import merge
from hf_kvret.layer.missed_mass import is_measured, measure_missed_mass
from hf_kvret.layer.regions import Regions
from hf_kvret.observe.counters import LayerCounters
from hf_kvret.observe.recall import Recall, measure_recall
from hf_kvret.observe.selection import selection
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.merge import Pieces
from hf_kvret_kernels.prompt_attention import prompt_pieces
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.rest_tokens import RestTokens, rest_logits
from hf_kvret_kernels.step_attention import step_attention


def attend_selected(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    counters: LayerCounters,
    final_len: int = 0,
    number: int = 0,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``counters`` are counted up; ``final_len`` as of ``compiling_ahead``; ``number`` of the layer in
    the model. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
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
    measured = is_measured(regions, index, counters)
    if (groups is None or call.sink_logits is None) and not measured:
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
                _note_search(regions, index, searching, host_ids, cold, counters, groups, number)
                index.after_search(host_ids)
            return out if groups is None else groups.unfold(out)
    if cold is None:
        return _attend_in_parts(regions, query, call, None)[0]
    with compiling_ahead(regions, query, cold, call, final_len):
        if index is None:
            finish = partial(attend_all, regions, query, cold, counters, number)
            return _attend_in_parts(regions, query, call, finish)[0]
        search = Search(searching, index, cold, groups)
        try:
            return _attend_to_search(regions, query, call, counters, search, number, measured)
        except WrongIdError as error:
            raise blamed_on(index, "search", error) from error


@dataclass(frozen=True, eq=False)
class Search:
    """A step's search.

    Attributes:
        query: ``[B, Hq, Q, Dk]``, folded where heads select in ``groups``.
        index: that searches.
        cold: the tokens that it searches.
        groups: of the query heads of a KV head; None: they select together.
    """

    query: torch.Tensor
    index: Index
    cold: ColdTokens
    groups: HeadGroups | None


def _attend_to_search(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    counters: LayerCounters,
    search: Search,
    number: int,
    measured: bool,
) -> torch.Tensor:
    """See ``attend_selected``, with the index's search part by part.

    ``measured``: whether the missed mass is counted.
    """
    searching, index, cold, groups = search.query, search.index, search.cold, search.groups
    selected = counters.total(cold)
    ids = index.search(searching, cold)
    _note_search(regions, index, searching, ids, cold, counters, groups, number)
    # First, so that a store elsewhere works while the device does all the rest.
    finish = cold.store.begin(searching, ids, cold.scale, cold.softcap)
    index.after_search(ids)
    rest = _mean_tokens(regions, searching, ids, cold)
    # With one position to see and no logits of heads, groups stay queries up to the end.
    folded = groups is not None and query.shape[2] == 1 and call.sink_logits is None
    unfolds = groups is not None and not folded
    joins = isinstance(finish, Pieces) and not unfolds
    if rest is not None and not joins:
        pieces = rest.pieces()
        finish = partial(_joined, finish, (pieces.outs, pieces.lses))
    if groups is not None and unfolds:
        finish = partial(_unfolded, groups, finish)
    attending = searching if folded else query
    tokens = rest if joins else None
    out, lse = _attend_in_parts(regions, attending, call, finish, ids, selected, tokens, folded)
    if measured:
        own_lse = groups.unfold(lse) if groups is not None and folded else lse
        measure_missed_mass(counters, regions, index, searching, ids, cold, own_lse, rest, groups)
    return groups.unfold(out) if groups is not None and folded else out


def _attend_in_parts(
    regions: Regions,
    query: torch.Tensor,
    call: AttentionCall,
    finish_cold: Callable[[], AttentionResult] | None,
    ids: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    rest: RestTokens | None = None,
    folded: bool = False,
) -> AttentionResult:
    """Attention to the window, to what ``finish_cold`` attends to and to the ``rest`` tokens.

    ``selected`` counts the ``ids``. Only ``Pieces`` take ``rest``. Queries that are ``folded`` are
    groups of heads at one position.
    """
    keys, values = regions.window.tokens()
    # Queries of one position see all that is held; there may be room behind it.
    one = folded or query.shape[2] == 1
    offset = None if one else keys.shape[2] - query.shape[2]
    options: dict[str, Any] = {
        "scale": call.scoring.scale,
        "causal_offset": offset,
        "valid": regions.window.validity(call.scoring.valid),
        "softcap": call.scoring.softcap,
    }
    if isinstance(finish_cold, Pieces):
        # Launched already: one launch more does all that is left.
        options |= {"sink_logits": call.sink_logits, "ids": ids, "selected": selected}
        return step_attention(query, keys, values, finish_cold, **options, rest=rest)
    near = prompt_pieces(query, keys, values, **options)
    parts = [(near.outs, near.lses)]
    if ids is not None and selected is not None:
        count_ids(ids, selected)
    if finish_cold is not None:
        parts.append(finish_cold())
    return merge(parts, call.sink_logits, query.dtype)


def _mean_tokens(
    regions: Regions, query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens
) -> RestTokens | None:
    """The means of all cold tokens, by blocks, with the weight of those that ids leave out."""
    if regions.config.rest is None:
        return None
    means = regions.rest_sums(cold).means()
    logits = rest_logits(query, means, ids, scale=cold.scale, softcap=cold.softcap)
    return RestTokens(logits, means.values)


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
