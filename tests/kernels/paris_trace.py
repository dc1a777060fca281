"""What each stage of ParisKV's search leaves in the compiled library."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

import torch

from hf_kvret_kernels import host_library, host_step
from hf_kvret_kernels.host_step import HostCold, HostWindow, ParisSearch
from hf_kvret_kernels.paged import PagedRows

# hfk_paris_trace: five addresses.
_TRACE = struct.Struct("@5P")


class ParisTrace(NamedTuple):
    """C the candidates, G queries of a group.

    Attributes:
        rotated: ``[B, H, Q, G, P]`` fp32.
        points: ``[B, H, Q, G, P // 8, 256]`` uint8, of each sign byte.
        scores: ``[B, H, Q, n]`` uint8: one more than the points, 0 for tokens that are not valid.
        candidates: ``[B, H, Q, C]`` int32, -1 behind the last one.
        estimates: ``[B, H, Q, G, C]`` fp32, -inf behind the last one.
        ids: ``[B, H, Q, budget]`` int32.
    """

    rotated: torch.Tensor
    points: torch.Tensor
    scores: torch.Tensor
    candidates: torch.Tensor
    estimates: torch.Tensor
    ids: torch.Tensor


def trace_paris(
    query: torch.Tensor,
    search: ParisSearch,
    valid: torch.Tensor,
    budget: int,
    *,
    softcap: float | None = None,
) -> ParisTrace:
    """Of ``query [B, Hq, Q, Dk]`` with a scale of 0.1; arguments as of ``run_step``."""
    batch, query_heads, queries, dim = query.shape
    heads, n = search.counts.shape[1], valid.shape[1]
    tables = 1 if search.mean_query else query_heads // heads
    lead, rotated_dim = (batch, heads, queries), len(search.signs)
    trace = ParisTrace(
        query.new_empty(*lead, tables, rotated_dim, dtype=torch.float32),
        query.new_empty(*lead, tables, rotated_dim // 8, 256, dtype=torch.uint8),
        query.new_empty(*lead, n, dtype=torch.uint8),
        query.new_empty(*lead, search.candidates, dtype=torch.int32),
        query.new_full((*lead, tables, search.candidates), -math.inf, dtype=torch.float32),
        query.new_empty(*lead, budget, dtype=torch.int32),
    )
    empty = query.new_empty(batch, heads, 0, dim)
    no_rows = PagedRows([query.new_empty(1, heads, 1, 2 * dim)], trace.ids[0, :1, 0], dim)
    cold, window = HostCold(no_rows, search, valid, budget), HostWindow(empty, empty, 0)
    scores = 0.1, softcap, None
    step, _keep = host_step._pack_step(
        query, window, cold, scores, trace.ids, trace.rotated, None, 1
    )
    arrays = (trace.rotated, trace.points, trace.scores, trace.candidates, trace.estimates)
    find = host_library.load().hfk_search_ids
    find.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    assert find(step, _TRACE.pack(*(array.data_ptr() for array in arrays))) == 0
    return trace
