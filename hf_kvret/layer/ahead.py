"""Kernels that steps to come will need are compiled in the first decode step of a layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.layer.call import AttentionCall
from hf_kvret.layer.regions import Regions
from hf_kvret_kernels._dispatch import Growth, Window, growing


def compiling_ahead(
    regions: Regions,
    query: torch.Tensor,
    cold: ColdTokens | None,
    call: AttentionCall,
    final_len: int,
) -> AbstractContextManager[None]:
    """Context of a decode step on a GPU: kernels are compiled for later steps with such queries.

    For those up to ``final_len`` tokens, or to twice as many as there are where fewer were
    announced. Once for each shape of ``query [B, Hq, Q, Dk]`` and as many tokens, and never within
    a capture, which a compilation could break.
    """
    known = regions.compiled_len
    if cold is None or not query.is_cuda or regions.length <= known.get(query.shape, 0):
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        return nullcontext()
    if final_len <= regions.length:
        final_len = 2 * regions.length
    known[query.shape] = final_len
    return growing(_growth(regions, query.shape[2], cold, call, final_len))


def _growth(
    regions: Regions, queries: int, cold: ColdTokens, call: AttentionCall, final_len: int
) -> Growth:
    config, window = regions.config, regions.window
    last = max(len(cold), final_len - config.recent)
    lengths = [len(cold)]
    while lengths[-1] < last:
        lengths.append(min(2 * lengths[-1], last))
    counts = tuple(sorted({config.budget(length) for length in lengths}))
    # A flush leaves the shortest window. What is captured reads all of it, and goes by a mask.
    shortest, longest = window.sink + config.recent + queries, window.sink + regions.most_recent
    masked = call.scoring.valid is not None or not window.sinks_full
    windows = [Window(tokens, masked) for tokens in range(shortest, longest + 1)]
    if config.graph is not False and queries == 1:
        windows.append(Window(longest, masked=True))
    return Growth(last - len(cold), counts, tuple(windows))
