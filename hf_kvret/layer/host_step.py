"""A decode step of a layer on the CPU in one call of the compiled library."""

from __future__ import annotations

from functools import cache

import torch

from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.layer.call import AttentionCall
from hf_kvret.layer.window import Window
from hf_kvret_kernels import host_step
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.rest_tokens import RestMeans


def attend_on_host(
    query: torch.Tensor,
    window: Window,
    index: Index | None,
    cold: ColdTokens | None,
    call: AttentionCall,
    selected: torch.Tensor | None,
    position_queries: int = 1,
    rest: RestMeans | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of ``query [B, Hq, Q, Dk]`` to the window and to what the index finds in ``cold``.

    ``selected`` is an int64 to which the number of tokens found is added, in place.
    ``position_queries`` as of ``host_step.run_step``, ``rest`` as of ``HostCold``.

    Returns:
        ``out [B, Hq, Q, Dv]`` of the query's dtype and the ids, as of ``Index.search``. None where
        the step is to be done part by part: the device is another, the library is not there, a
        backend is preferred, a graph is captured, or the store's rows don't lie where the library
        reads them.
    """
    if not query.is_cpu or query.dtype != window.keys.dtype or host_step.why_not():
        return None
    if preferred() is not None or window.place is not None:
        return None
    rows, search = None, None
    if cold is not None:
        rows = cold.store.host_rows()
        if rows is None or index is None:
            return None
        search = index.host_search(query, cold) if _describes_its_search(index) else None
    method = "search" if search is None else "host_search"
    valid = window.validity(call.scoring.valid)
    near = window.host
    if near is None or near.keys is not window.keys:
        near = window.host = host_step.HostWindow(window.keys, window.values, 0)
    near.length, near.valid = window.sink + window.length, valid
    try:
        chosen = None
        if cold is not None and index is not None and rows is not None:
            if search is None:
                search = host_step.GivenIds(index.search(query, cold))
            chosen = host_step.HostCold(rows, search, cold.valid, cold.budget, rest)
        return host_step.run_step(
            query,
            near,
            chosen,
            scale=call.scoring.scale,
            softcap=call.scoring.softcap,
            sink_logits=call.sink_logits,
            selected=selected,
            dtype=query.dtype,
            position_queries=position_queries,
        )
    except WrongIdError as error:
        assert index is not None, "only an index names tokens"
        raise blamed_on(index, method, error) from error


def _describes_its_search(index: Index) -> bool:
    """Whether ``host_search`` belongs to the ``search`` that is there, not to one it replaced."""
    return "search" not in vars(index) and _describes_own_search(type(index))


@cache
def _describes_own_search(kind: type[Index]) -> bool:
    names = ("host_search", "search")
    return next(name for base in kind.__mro__ for name in names if name in vars(base)) == names[0]
