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
from hf_kvret.layer.operations import Result, attend_by_operations
from hf_kvret.layer.queries import AttentionCall
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
    # Without an index all cold tokens are attended to.
    index = None if cold is None else kv.ready_index(cold)
    result = _attend_on_host(kv, query, call, cold, index)
    if result is None:
        result = attend_by_operations(kv, query, call, cold, index)
    if cold is not None:
        record = StepRecord(number, kv, query, call, cold, result.ids)
        for subscriber in subscribers:
            subscriber(record)
    return result.out


def _attend_on_host(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    index: Index | None,
) -> Result | None:
    """The step in one call of the compiled library.

    None where it is to be done by operations: on another device, without the library, within
    ``prefer``, in a capture, without an index, and where the rows don't lie where the library reads
    them.
    """
    window = kv.window
    if not query.is_cpu or query.dtype != window.keys.dtype or window.capture is not None:
        return None
    if PREFERRED.get() is not None or host_step.why_not():
        return None
    host_cold = None
    if cold is not None:
        rows = cold.host_rows
        if rows is None or index is None:
            return None
        search = _host_search(index, query, cold)
        host_cold = host_step.HostCold(rows, search, cold.valid, cold.budget, kv.means(cold))
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
        )
    except WrongIdError as error:
        assert index is not None and host_cold is not None, "only an index names tokens"
        method = "search" if isinstance(host_cold.search, host_step.GivenIds) else "host_search"
        raise blamed_on(index, method, error) from error
    if index is not None and index.looks_back:
        kv.after_search(ids)
    return Result(out, ids)


def _host_search(index: Index, query: torch.Tensor, cold: ColdTokens) -> host_step.HostSearch:
    """What the library has to know to search; the ids where only the index can."""
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
