"""A decode step, operation by operation: search, attention to what it names, window, merge.

Each operation is a kernel of the device or its twin in plain torch. The order lets them overlap:
a store that works elsewhere begins first, and the window is launched before its result is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_kvret.contracts.chunks import chunk_len
from hf_kvret.contracts.index import ColdTokens, Index, blamed_on
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.layer.exact_attention import attend_cold, merge
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret_kernels.ids import WrongIdError
from hf_kvret_kernels.mean_tokens import MeanTokens, mean_logits
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention import prompt_partials
from hf_kvret_kernels.relevance import count_ids
from hf_kvret_kernels.step_attention import step_attention


class Result(NamedTuple):
    """What a step computes: ``out`` as of ``attend_step``, ``ids`` as of ``StepRecord``."""

    out: torch.Tensor
    ids: torch.Tensor | None = None


def attend_by_operations(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens | None,
    index: Index | None,
) -> Result:
    """Attention of ``query [B, Hq, Q, Dk]`` to window and cold tokens, operation by operation.

    ``index`` None: all of ``cold`` are attended to.
    """
    if cold is None:
        return Result(_with_window(kv, query, call))
    if index is None:
        window, queries = kv.window, query.shape[2]
        heads = window.keys.shape[1]
        length = chunk_len(queries, window.keys, heads * window.row_dim)
        out = _with_window(kv, query, call, partial(attend_cold, query, cold, length))
        kv.selected.add_(cold.valid.sum() * heads * queries)
        return Result(out)
    try:
        return _attend_to_search(kv, query, call, cold, index)
    except WrongIdError as error:
        raise blamed_on(index, "search", error) from error


def _attend_to_search(
    kv: LayerKV, query: torch.Tensor, call: AttentionCall, cold: ColdTokens, index: Index
) -> Result:
    if index.recalls and cold.store.ranks_elsewhere:
        candidates = index.recall(query, cold)
        if candidates is not None:
            return _attend_to_best(kv, query, call, cold, index, candidates)
    ids = index.search(query, cold)
    # First, so that a store elsewhere works while the device does all the rest.
    finish = cold.store.begin(query, ids, cold.scale, cold.softcap)
    if index.looks_back:
        kv.after_search(ids)
    means = _mean_tokens(kv, query, ids, cold)
    if isinstance(finish, Partials):
        # Launched already: one launch more does all that is left.
        out, _ = step_attention(
            query,
            *kv.window.tokens(),
            finish,
            **_window_arguments(kv, query, call),
            sink_logits=call.sink_logits,
            ids=ids,
            selected=kv.selected,
            means=means,
        )
        return Result(out, ids)
    count_ids(ids, kv.selected)
    return Result(_with_window(kv, query, call, lambda: _with_means(finish(), means)), ids)


def _attend_to_best(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    cold: ColdTokens,
    index: Index,
    candidates: torch.Tensor,
) -> Result:
    """As ``_attend_to_search``, where the store finds out which of the candidates are the best.

    Their ids come back with the result, while the device attends to the window.
    """
    finish = cold.store.begin_with_best(query, candidates, cold.budget, cold.scale, cold.softcap)
    near = _attend_to_window(kv, query, call)
    out, lse, ids = finish()
    far = _with_means((out, lse), _mean_tokens(kv, query, ids, cold))
    out, _ = merge([near, far], call.sink_logits, query.dtype)
    count_ids(ids, kv.selected)
    if index.looks_back:
        kv.after_search(ids)
    return Result(out, ids)


def _with_means(result: AttentionResult, means: MeanTokens | None) -> AttentionResult:
    """``result``, merged with what the means give."""
    if means is None:
        return result
    partials = means.partials()
    return merge([result, (partials.outs, partials.lses)])


def _with_window(
    kv: LayerKV,
    query: torch.Tensor,
    call: AttentionCall,
    attend_to_cold: Callable[[], AttentionResult] | None = None,
) -> torch.Tensor:
    """Attention to the window, which is launched first, and to what ``attend_to_cold`` does."""
    parts = [_attend_to_window(kv, query, call)]
    if attend_to_cold is not None:
        parts.append(attend_to_cold())
    return merge(parts, call.sink_logits, query.dtype)[0]


def _attend_to_window(kv: LayerKV, query: torch.Tensor, call: AttentionCall) -> AttentionResult:
    arguments = _window_arguments(kv, query, call)
    near = prompt_partials(query, *kv.window.tokens(), **arguments)
    return near.outs, near.lses


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
