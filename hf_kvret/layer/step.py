"""A decode step of a layer: attention of a few queries to all that the layer holds.

The index names the cold tokens that matter to each query; the store attends to these where they
lie, the window to the newest ones and the attention sinks, and both are merged exactly. On a CPU
the compiled library does all of it in one call. Whoever counts or watches gets a ``StepRecord``
after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from hf_kvret.contracts.chunks import chunk_len
from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import attend_cold, merge
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall, HeadGroups
from hf_kvret.layer.record import StepRecord, Subscriber
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import PREFERRED
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.mean_tokens import MeanTokens, mean_logits
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention import prompt_partials
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.step_attention import step_attention


@dataclass(frozen=True, eq=False)
class Search:
    """An index, and what it is asked; attributes as of ``StepRecord``."""

    query: torch.Tensor
    index: Index
    cold: ColdTokens
    groups: HeadGroups | None

    @classmethod
    def of(cls, kv: LayerKV, query: torch.Tensor, cold: ColdTokens) -> Search | None:
        """None where there is no index: all cold tokens are attended to."""
        index = kv.ready_index(cold)
        if index is None:
            return None
        size, groups = kv.config.select_heads, None
        if size is not None:
            groups = HeadGroups.of(size, kv.window.keys.shape[1], query.shape[1])
        return cls(query if groups is None else groups.fold(query), index, cold, groups)


class Result(NamedTuple):
    """What a step computes; attributes as of ``StepRecord``, ``out`` as of ``attend_step``."""

    out: torch.Tensor
    ids: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    means: MeanTokens | None = None


def attend_step(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    subscribers: Sequence[Subscriber] = (),
    number: int = 0,
) -> torch.Tensor:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds.

    ``number`` of the layer in the model. Returns ``[B, Hq, Q, Dv]``, fp32 or the query's dtype.
    """
    cold = kv.cold(call.scoring)
    search = None if cold is None else Search.of(kv, query, cold)
    needs_lse = any([each.needs_lse(kv) for each in subscribers if each.asks_for_lse])
    result = None if needs_lse else _attend_on_host(kv, query, call, cold, search)
    if result is None:
        result = _attend_in_parts(kv, query, call, cold, search)
    if cold is not None:
        searching, groups = (query, None) if search is None else (search.query, search.groups)
        record = StepRecord(number, kv, searching, cold, result.ids, groups, *result[2:])
        for subscriber in subscribers:
            subscriber(record)
    return result.out


def _attend_on_host(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    search: Search | None,
) -> Result | None:
    """The step in one call of the compiled library.

    None where it is to be done part by part: on another device, without the library, within
    ``prefer``, in a capture, where heads in groups have sink logits of their own, without an index,
    and where the rows don't lie where the library reads them.
    """
    window = kv.window
    if not query.is_cpu or query.dtype != window.keys.dtype or window.place is not None:
        return None
    if PREFERRED.get() is not None or host_step.why_not():
        return None
    groups, chosen, position_queries = None, None, 1
    if cold is not None:
        rows = cold.host_rows
        if rows is None or search is None:
            return None
        groups, query = search.groups, search.query
        if groups is not None:
            if call.sink_logits is not None:
                return None
            # A group's queries see what those of any other group see at their position.
            position_queries = groups.count
        chosen = host_step.HostCold(
            rows, _host_search(search), cold.valid, cold.budget, kv.means(cold)
        )
    try:
        out, ids = host_step.run_step(
            query,
            window.on_host(call.scoring.valid),
            chosen,
            scale=call.scoring.scale,
            softcap=call.scoring.softcap,
            sink_logits=call.sink_logits,
            selected=kv.selected,
            dtype=query.dtype,
            position_queries=position_queries,
        )
    except WrongIdError as error:
        assert search is not None and chosen is not None, "only an index names tokens"
        given = isinstance(chosen.search, host_step.GivenIds)
        raise blamed_on(search.index, "search" if given else "host_search", error) from error
    if search is not None and search.index.looks_back:
        search.index.after_search(ids)
    return Result(out if groups is None else groups.unfold(out), ids)


def _host_search(search: Search) -> host_step.HostSearch:
    """What the library has to know to search; the ids where only the index can."""
    query, index, cold = search.query, search.index, search.cold
    if "search" not in vars(index) and _describes_own_search(type(index)):
        known = index.host_search(query, cold)
        if known is not None:
            return known
    return host_step.GivenIds(index.search(query, cold))


@cache
def _describes_own_search(kind: type[Index]) -> bool:
    """Whether ``host_search`` belongs to the ``search`` that is there, not to one it replaced."""
    names = ("host_search", "search")
    return next(name for base in kind.__mro__ for name in names if name in vars(base)) == names[0]


def _attend_in_parts(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    search: Search | None,
) -> Result:
    """The step, operation by operation."""
    if cold is None:
        return Result(_with_window(kv, query, call)[0])
    if search is None:
        window, queries = kv.window, query.shape[2]
        heads = window.keys.shape[1]
        length = chunk_len(queries, window.keys, heads * window.row_dim)
        out, lse = _with_window(kv, query, call, partial(attend_cold, query, cold, length))
        kv.selected.add_(cold.valid.sum() * heads * queries)
        return Result(out, None, lse)
    try:
        return _attend_to_search(kv, query, call, search)
    except WrongIdError as error:
        raise blamed_on(search.index, "search", error) from error


def _attend_to_search(
    kv: LayerKV, query: torch.Tensor, call: AttentionCall, search: Search
) -> Result:
    index, cold, groups = search.index, search.cold, search.groups
    ids = index.search(search.query, cold)
    # First, so that a store elsewhere works while the device does all the rest.
    finish = cold.store.begin(search.query, ids, cold.scale, cold.softcap)
    if index.looks_back:
        index.after_search(ids)
    means = _mean_tokens(kv, search.query, ids, cold)
    if isinstance(finish, Partials) and groups is None:
        # Launched already: one launch more does all that is left.
        out, lse = step_attention(
            query,
            *kv.window.tokens(),
            finish,
            **_window_arguments(kv, query, call),
            sink_logits=call.sink_logits,
            ids=ids,
            selected=kv.selected,
            means=means,
        )
        return Result(out, ids, lse, means)
    count_ids(ids, kv.selected)

    def attend() -> AttentionResult:
        parts = [finish()]
        if means is not None:
            partials = means.partials()
            parts.append((partials.outs, partials.lses))
        out, lse = merge(parts) if len(parts) > 1 else parts[0]
        return (out, lse) if groups is None else (groups.unfold(out), groups.unfold(lse))

    out, lse = _with_window(kv, query, call, attend)
    return Result(out, ids, lse, means)


def _with_window(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    attend_to_cold: Callable[[], AttentionResult] | None = None,
) -> AttentionResult:
    """Attention to the window, which is launched first, and to what ``attend_to_cold`` does."""
    arguments = _window_arguments(kv, query, call)
    near = prompt_partials(query, *kv.window.tokens(), **arguments)
    parts = [(near.outs, near.lses)]
    if attend_to_cold is not None:
        parts.append(attend_to_cold())
    return merge(parts, call.sink_logits, query.dtype)


def _window_arguments(kv: LayerKV, query: torch.Tensor, call: AttentionCall) -> dict[str, Any]:
    """How queries see the window."""
    window, scoring, queries = kv.window, call.scoring, query.shape[2]
    # One query sees all that is held; there may be room behind it.
    offset = window.tokens()[0].shape[2] - queries if queries > 1 else None
    valid = window.validity(scoring.valid)
    return {
        "scale": scoring.scale,
        "causal_offset": offset,
        "valid": valid,
        "softcap": scoring.softcap,
    }


def _mean_tokens(
    kv: LayerKV, query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens
) -> MeanTokens | None:
    """The means of all cold tokens, by blocks, with the weight of those that ids leave out."""
    means = kv.means(cold)
    if means is None:
        return None
    logits = mean_logits(query, means, ids, scale=cold.scale, softcap=cold.softcap)
    return MeanTokens(logits, means.values)
