"""A decode step of a layer: attention of a few queries to all that the layer holds.

The index names the cold tokens that matter to each query; the store attends to these where they
lie, the window to the newest ones and the attention sinks, and both are merged exactly. On a CPU
the compiled library does all of it in one call; elsewhere each of it is an operation. Subscribers,
who count and watch, get a ``StepRecord`` after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.operations import Result, Search, attend_by_operations
from hf_kvret.layer.queries import AttentionCall, HeadGroups
from hf_kvret.layer.record import StepRecord, Subscriber
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import PREFERRED
from hf_kvret_kernels.ids import WrongIdError


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
    search = None if cold is None else _search(kv, query, cold)
    needs_lse = any([each.needs_lse(kv) for each in subscribers if each.asks_for_lse])
    result = None if needs_lse else _attend_on_host(kv, query, call, cold, search)
    if result is None:
        result = attend_by_operations(kv, query, call, cold, search)
    if cold is not None:
        searching, groups = (query, None) if search is None else (search.query, search.groups)
        record = StepRecord(number, kv, searching, cold, result.ids, groups, *result[2:])
        for subscriber in subscribers:
            subscriber(record)
    return result.out


def _search(kv: LayerKV, query: torch.Tensor, cold: ColdTokens) -> Search | None:
    """None where there is no index: all cold tokens are attended to."""
    index = kv.ready_index(cold)
    if index is None:
        return None
    size, groups = kv.config.select_heads, None
    if size is not None:
        groups = HeadGroups.of(size, kv.window.keys.shape[1], query.shape[1])
    return Search(query if groups is None else groups.fold(query), index, cold, groups)


def _attend_on_host(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    search: Search | None,
) -> Result | None:
    """The step in one call of the compiled library.

    None where it is to be done by operations: on another device, without the library, within
    ``prefer``, in a capture, where heads in groups have sink logits of their own, without an index,
    and where the rows don't lie where the library reads them.
    """
    window = kv.window
    if not query.is_cpu or query.dtype != window.keys.dtype or window.capture is not None:
        return None
    if PREFERRED.get() is not None or host_step.why_not():
        return None
    groups, host_cold, position_queries = None, None, 1
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
        host_cold = host_step.HostCold(
            rows, _host_search(search), cold.valid, cold.budget, kv.means(cold)
        )
    try:
        out, ids = host_step.run_step(
            query,
            window.on_host(call.scoring.valid),
            host_cold,
            scale=call.scoring.scale,
            softcap=call.scoring.softcap,
            sink_logits=call.sink_logits,
            selected=kv.selected,
            dtype=query.dtype,
            position_queries=position_queries,
        )
    except WrongIdError as error:
        assert search is not None and host_cold is not None, "only an index names tokens"
        method = "search" if isinstance(host_cold.search, host_step.GivenIds) else "host_search"
        raise blamed_on(search.index, method, error) from error
    if search is not None and search.index.looks_back:
        kv.after_search(ids)
    return Result(out if groups is None else groups.unfold(out), ids)


def _host_search(search: Search) -> host_step.HostSearch:
    """What the library has to know to search; the ids where only the index can."""
    query, index, cold = search.query, search.index, search.cold
    if "search" not in vars(index) and _describes_own_search(type(index)):
        description = index.host_search(query, cold)
        if description is not None:
            return description
    return host_step.GivenIds(index.search(query, cold))


@cache
def _describes_own_search(index_class: type[Index]) -> bool:
    """Whether ``host_search`` belongs to the ``search`` that is there, not to one it replaced."""
    names = ("host_search", "search")
    return (
        next(name for base in index_class.__mro__ for name in names if name in vars(base))
        == names[0]
    )
