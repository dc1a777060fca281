"""A whole decode step of a layer in one call: search, attention to what it finds, and the window.

The compiled library (``kernels/csrc``) does on the CPU what an index's search, a store's attention,
the window's and their merge do one after the other. What a search means stands in the naive code of
its operations, as ``paris/naive.py``.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.host_library import why_not
from hf_kvret_kernels.host_step.searches import FlatSearch, HostSearch, ParisSearch
from hf_kvret_kernels.paged import PagedRows

__all__ = ["FlatSearch", "HostSearch", "HostWindow", "ParisSearch", "ParisTrace", "run_step", "trace_paris", "why_not"]

# What follows hfk_request in hfk_step: window; valid, its stride and the cold tokens; addresses of
# search, sinks and the count of selected tokens; kind of the search, and a reserved number.
_STEP = struct.Struct("@3P3qP2q3P2i")
# hfk_paris_trace: five addresses.
_TRACE = struct.Struct("@5P")


@dataclass(eq=False)
class HostWindow:
    """Rows that all queries attend to.

    Attributes:
        keys: ``[B, Hkv, capacity, Dk]`` of the query's dtype, contiguous.
        values: ``[B, Hkv, capacity, Dv]``.
        length: rows held; of n queries, query i sees all but the last ``n - 1 - i``.
        valid: ``[B, length]`` bool, None when all are valid.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    valid: torch.Tensor | None = None


class ParisTrace(NamedTuple):
    """What the stages of ParisKV's search leave; C the candidates, G queries of a group.

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


def run_step(
    query: torch.Tensor,
    rows: PagedRows,
    search: HostSearch,
    window: HostWindow,
    valid: torch.Tensor,
    budget: int,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    threads: int | None = None,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the window and to the cold tokens that the search finds for it.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype.
        rows: the cold rows, in host memory.
        search: knows the same tokens as ``valid`` covers, in the batch rows and KV heads of ``rows``.
        window: beside the cold rows.
        valid: ``[B, n]`` bool, False for cold tokens that are never chosen.
        budget: how many of them a query chooses, at least 1.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        selected: int64 of one element, to which the number of chosen tokens is added, in place.
        threads: as of ``host_attention``.
        path: as of ``host_attention``.

    Returns:
        ``out [B, Hq, Q, Dv]`` fp32, and the chosen ids ``[B, Hkv, Q, budget]`` int32, -1 where fewer
        tokens are valid.

    Raises:
        ImportError: no library; see ``why_not()``.
        ValueError: a query of another dtype or another head dim than the rows.
        MemoryError: no room for the work space.
    """
    if query.dtype != rows.dtype or query.shape[3] != rows.key_dim:
        raise ValueError(
            f"query is {query.dtype} of {query.shape[3]} dims, rows are {rows.dtype} of "
            f"{rows.key_dim}: convert the query"
        )
    query, threads = query.contiguous(), host_library.thread_count(threads)
    table, pages = rows.table.contiguous(), rows.addresses().contiguous()
    batch, query_heads, queries, _ = query.shape
    ids = torch.empty(batch, rows.heads, queries, budget, dtype=torch.int32)
    out = torch.empty(batch, query_heads, queries, rows.value_dim)
    step, _keep = _pack_step(
        host_library.pack_request(
            query, rows, table, pages, ids, out, None, scale, softcap, threads, path
        ),
        search,
        window,
        valid,
        sink_logits,
        selected,
    )
    if host_library.call("hfk_run_step", threads, step) == host_library.BAD_ID:
        rows.check_range(ids)
        raise AssertionError("the library refuses what check_range refuses")
    return out, ids


def trace_paris(
    query: torch.Tensor,
    search: ParisSearch,
    valid: torch.Tensor,
    budget: int,
    *,
    scale: float,
    softcap: float | None = None,
    path: str | None = None,
) -> ParisTrace:
    """What each stage of ParisKV's search does with ``query [B, Hq, Q, Dk]``; for tests.

    Arguments as of ``run_step``.
    """
    query = query.contiguous()
    batch, query_heads, queries, dim = query.shape
    heads, n = search.counts.shape[1], valid.shape[1]
    tables = 1 if search.mean_query else query_heads // heads
    lead, padded = (batch, heads, queries), len(search.signs)
    trace = ParisTrace(
        torch.empty(*lead, tables, padded),
        torch.empty(*lead, tables, padded // 8, 256, dtype=torch.uint8),
        torch.empty(*lead, n, dtype=torch.uint8),
        torch.empty(*lead, search.candidates, dtype=torch.int32),
        torch.full((*lead, tables, search.candidates), -math.inf),
        torch.empty(*lead, budget, dtype=torch.int32),
    )
    # No rows are read: a page table of one page without any.
    no_rows = PagedRows([query.new_empty(1, heads, 1, 2 * dim)], valid.new_zeros(batch, 1).int(), dim)
    table, pages = no_rows.table, no_rows.addresses()
    request = host_library.pack_request(
        query, no_rows, table, pages, trace.ids, trace.rotated, None, scale, softcap, 1, path
    )
    empty = query.new_empty(batch, heads, 0, dim)
    step, _keep = _pack_step(request, search, HostWindow(empty, empty, 0), valid, None, None)
    arrays = (trace.rotated, trace.points, trace.scores, trace.candidates, trace.estimates)
    host_library.call(
        "hfk_search_ids", 1, step, _TRACE.pack(*(array.data_ptr() for array in arrays))
    )
    return trace


def _pack_step(
    request: bytes,
    search: HostSearch,
    window: HostWindow,
    valid: torch.Tensor,
    sink_logits: torch.Tensor | None,
    selected: torch.Tensor | None,
) -> tuple[bytes, tuple[object, ...]]:
    """``hfk_step``, and what must live until the call is over."""
    if valid.stride(1) != 1:
        valid = valid.contiguous()
    near = window.valid
    if near is not None and near.stride(1) != 1:
        near = near.contiguous()
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    searched = ctypes.c_char_p(search.pack())
    step = request + _STEP.pack(
        window.keys.data_ptr(),
        window.values.data_ptr(),
        0 if near is None else near.data_ptr(),
        0 if near is None else near.stride(0),
        window.keys.shape[2],
        window.length,
        valid.data_ptr(),
        valid.stride(0),
        valid.shape[1],
        ctypes.cast(searched, ctypes.c_void_p).value or 0,
        0 if sink_logits is None else sink_logits.data_ptr(),
        0 if selected is None else selected.data_ptr(),
        search.kind,
        0,
    )
    return step, (search, searched, valid, near, sink_logits, selected)
