"""A whole decode step of a layer in one call: search, attention to what it finds, and the window.

The compiled library (``kernels/csrc``) does on the CPU what an index's search, a store's attention,
the window's and their merge do one after the other. What a search means stands in the naive code of
its operations, as ``paris/naive.py``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.host_library import why_not
from hf_kvret_kernels.host_step.searches import (
    CodebookSearch,
    FlatSearch,
    Generation,
    GivenIds,
    HostSearch,
    ListSearch,
    ParisSearch,
    ProxySearch,
)
from hf_kvret_kernels.mean_tokens import BlockMeans
from hf_kvret_kernels.paged import HostRows, PagedRows

__all__ = [
    "CodebookSearch",
    "FlatSearch",
    "Generation",
    "GivenIds",
    "HostCold",
    "HostSearch",
    "HostWindow",
    "ListSearch",
    "ParisSearch",
    "ParisTrace",
    "ProxySearch",
    "run_step",
    "trace_paris",
    "why_not",
]

# What follows hfk_request in hfk_step: window; mean tokens; valid, its stride and the cold tokens;
# addresses of search, sinks, the count of selected tokens and the result; kind of the search, a
# reserved number.
_STEP = struct.Struct("@3P5q3P2qP2q4P2i")
# hfk_paris_trace: five addresses.
_TRACE = struct.Struct("@5P")


@dataclass(eq=False)
class HostWindow:
    """Rows that all queries attend to. May be used for step after step, with other lengths.

    Attributes:
        keys: ``[B, Hkv, capacity, Dk]`` of the query's dtype, contiguous; or its first rows, a
            view ``[:, :, :n]``.
        values: ``[B, Hkv, capacity, Dv]``, the same; or the first numbers of ``keys``, a view
            ``keys[..., :Dv]``.
        length: rows held; of queries at n positions, those at position i see all but the last
            ``n - 1 - i``.
        valid: ``[B, length]`` bool, None when all are valid.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    valid: torch.Tensor | None = None

    @functools.cached_property
    def capacity(self) -> int:
        """Tokens from one head to the next; ValueError where the buffers don't fit each other."""
        return _window_capacity(self.keys, self.values)

    @functools.cached_property
    def value_row(self) -> int:
        """Numbers from one token's value to the next one's."""
        return _value_row(self.keys, self.values)

    def __getstate__(self) -> dict[str, object]:
        """Without addresses, which are good for these buffers alone."""
        return {name: value for name, value in vars(self).items() if name != "_addresses"}

    @functools.cached_property
    def _addresses(self) -> tuple[int, int]:
        return self.keys.data_ptr(), self.values.data_ptr()


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


@dataclass(eq=False)
class HostCold:
    """Cold tokens, some of which each query chooses.

    Attributes:
        rows: their keys and values, in host memory; coded ones by HIGGS.
        search: knows the same tokens, in the same batch rows and KV heads; or ``GivenIds``, then
            ``valid`` and ``budget`` are not looked at.
        valid: ``[B, n]`` bool, False for tokens that are never chosen.
        budget: how many of them a query chooses, at least 1.
        means: what stands for those that a query does not choose; None: nothing does.
    """

    rows: HostRows
    search: HostSearch
    valid: torch.Tensor
    budget: int
    means: BlockMeans | None = None


def run_step(
    query: torch.Tensor,
    window: HostWindow,
    cold: HostCold | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    position_queries: int = 1,
    threads: int | None = None,
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the window and to the cold tokens that a search finds for it.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype.
        window: rows that all queries see.
        cold: others; None for none.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        sink_logits: ``[Hq]`` attention sink logits, or None.
        selected: int64 of one element, to which the number of chosen tokens is added, in place.
        dtype: of ``out``: float32, or the query's.
        position_queries: how many consecutive queries are at one position, a divisor of Q.
        threads: as of ``host_attention``.
        path: as of ``host_attention``.

    Returns:
        ``out [B, Hq, Q, Dv]`` of ``dtype``, and the chosen ids ``[B, H, Q, budget]`` int32, -1
        where fewer tokens are valid, H the heads that choose; those of ``GivenIds`` as they are.

    Raises:
        ImportError: no library; see ``why_not()``.
        ValueError: another ``dtype`` than these two, ``position_queries`` that don't divide Q, a
            query of another dtype or head dim than the rows, windows or cold rows that do not fit
            each other, ids that a short page table does not lead to.
        WrongIdError: a ValueError, for an id of no token, or a code of no codeword.
        MemoryError: no room for the work space.
    """
    if dtype not in (torch.float32, query.dtype):
        raise ValueError(f"dtype {dtype}: a step writes float32 or its query's {query.dtype}")
    capacity = window.capacity
    _check_window(query, window.keys, window.length, position_queries)
    heads, value_dim = window.keys.shape[1], window.values.shape[3]
    if cold is not None:
        _check_cold(query, cold.rows, cold.valid, value_dim)
        if cold.means is not None:
            cold.means.check(query, value_dim)
        known = cold.search.tokens()
        if known is not None and known != cold.valid.shape[1]:
            raise ValueError(
                f"the search knows {known} tokens, valid covers {cold.valid.shape[1]}: an index "
                "has to hold every token that was added"
            )
    query, threads = query.contiguous(), host_library.thread_count(threads)
    batch, query_heads, queries, _ = query.shape
    # The results have the query's device and fixed dtypes, whatever torch's defaults are.
    out = query.new_empty(batch, query_heads, queries, value_dim, dtype=dtype)
    sums, result = (out, None) if dtype == torch.float32 else (None, out)
    if cold is not None and isinstance(cold.search, GivenIds):
        ids = cold.search.ids.contiguous()
        _check_ids(query, ids, heads)
    else:
        budget = 0 if cold is None else cold.budget
        choosers = heads if cold is None else cold.search.heads or heads
        ids = query.new_empty(batch, choosers, queries, budget, dtype=torch.int32)
    # Without cold tokens no row is read.
    where, layout, coding = None, (query.shape[3] + value_dim, query.shape[3]), 0
    if cold is not None:
        rows = cold.rows
        addresses = rows.addresses() if rows.page_address is None else rows.page_address
        table = rows.table.contiguous()
        where = table, addresses, rows.page_len, rows.token_count, rows.in_files
        layout, coding = (rows.width, rows.value_start), rows.coding_address
    sizes = (heads, value_dim, *layout)
    request = host_library.pack_request(
        query, ids, where, sizes, sums, None, scale, softcap, threads, path, coding
    )
    lengths = capacity, position_queries
    step, _keep = _pack_step(request, window, lengths, cold, sink_logits, selected, result)
    if host_library.call("hfk_run_step", threads, step) == host_library.BAD_ID and cold is not None:
        if isinstance(cold.search, CodebookSearch):
            cold.search.check(cold.valid)
        cold.rows.check_range(ids)
        raise RuntimeError(
            "ids or page table changed while they were read: do not write to them in another thread"
        )
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

    Arguments as of ``HostCold`` and ``run_step``.
    """
    query = query.contiguous()
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
    request = host_library.pack_request(
        query,
        trace.ids,
        None,
        (heads, dim, 2 * dim, dim),
        trace.rotated,
        None,
        scale,
        softcap,
        1,
        path,
    )
    empty = query.new_empty(batch, heads, 0, dim)
    no_rows = PagedRows([query.new_empty(1, heads, 1, 2 * dim)], trace.ids[0, :1, 0], dim)
    cold = HostCold(no_rows, search, valid, budget)
    step, _keep = _pack_step(request, HostWindow(empty, empty, 0), (0, 1), cold, None, None, None)
    arrays = (trace.rotated, trace.points, trace.scores, trace.candidates, trace.estimates)
    host_library.call(
        "hfk_search_ids", 1, step, _TRACE.pack(*(array.data_ptr() for array in arrays))
    )
    return trace


def _pack_step(
    request: bytes,
    window: HostWindow,
    lengths: tuple[int, int],
    cold: HostCold | None,
    sink_logits: torch.Tensor | None,
    selected: torch.Tensor | None,
    result: torch.Tensor | None,
) -> tuple[bytes, tuple[object, ...]]:
    """``hfk_step``, and what must live until the call is over.

    ``lengths``: the window's capacity, and queries of a position.
    """
    near = window.valid
    if near is not None and near.stride(1) != 1:
        near = near.contiguous()
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    valid, searched, chosen, means = None, None, (0, 0, 0, 0), (0, 0, 0, 0, 0)
    if cold is not None:
        valid = cold.valid if cold.valid.stride(1) == 1 else cold.valid.contiguous()
        searched = ctypes.c_char_p(cold.search.pack())
        address = ctypes.cast(searched, ctypes.c_void_p).value or 0
        chosen = valid.data_ptr(), valid.stride(0), valid.shape[1], address
        means = _packed_means(cold.means)
    step = request + _STEP.pack(
        *window._addresses,
        0 if near is None else near.data_ptr(),
        0 if near is None else near.stride(0),
        lengths[0],
        window.length,
        lengths[1],
        window.value_row,
        *means,
        *chosen,
        0 if sink_logits is None else sink_logits.data_ptr(),
        0 if selected is None else selected.data_ptr(),
        0 if result is None else result.data_ptr(),
        0 if cold is None else cold.search.kind,
        0,
    )
    return step, (cold, searched, valid, near, sink_logits)


def _packed_means(means: BlockMeans | None) -> tuple[int, int, int, int, int]:
    """The numbers of ``hfk_means``."""
    if means is None:
        return 0, 0, 0, 0, 0
    tensors = means.keys, means.values, means.counts
    keys, values, counts = (each.data_ptr() for each in tensors)
    return keys, values, counts, means.keys.shape[2], means.block_len


def _check_window(
    query: torch.Tensor, keys: torch.Tensor, length: int, position_queries: int
) -> None:
    """ValueError where the ``length`` rows of a window are not for this query.

    ``position_queries`` of its queries are at one position.
    """
    batch, query_heads, queries, key_dim = query.shape
    rows, heads, capacity, row_dim = keys.shape
    if query.dtype != keys.dtype or key_dim != row_dim:
        raise ValueError(
            f"query is {query.dtype} of {key_dim} dims, rows are {keys.dtype} of {row_dim}: "
            "convert the query"
        )
    if rows != batch or query_heads % heads:
        raise ValueError(
            f"query is {tuple(query.shape)}, keys are {keys.dtype} {tuple(keys.shape)}: pass rows "
            "for the query's batch, and KV heads that divide its heads"
        )
    if position_queries < 1 or queries % position_queries:
        raise ValueError(
            f"position_queries={position_queries}: it must divide the {queries} queries"
        )
    positions = queries // position_queries
    if length and not positions <= length <= capacity:
        raise ValueError(
            f"length={length}: {positions} queries are among the rows held, and the buffers have "
            f"{capacity}: pass 0 or a number between"
        )


def _window_capacity(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Tokens from one head to the next in a window's buffers, see ``HostWindow``.

    ValueError where the buffers do not fit each other.
    """
    if keys.shape[:3] != values.shape[:3] or values.dtype != keys.dtype:
        raise ValueError(
            f"keys are {keys.dtype} {tuple(keys.shape)}, values {values.dtype} "
            f"{tuple(values.shape)}: pass rows of one dtype for the same tokens"
        )
    capacities = {_capacity(keys, keys.shape[3]), _capacity(values, _value_row(keys, values))}
    if len(capacities) > 1 or min(capacities) < keys.shape[2]:
        raise ValueError(
            f"keys have strides {keys.stride()}, values {values.stride()}: pass contiguous "
            "[B, Hkv, capacity, D] buffers of one capacity, or views [:, :, :n] of such; values "
            "may be the first numbers of keys"
        )
    return capacities.pop()


def _value_row(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Numbers from one token's value to the next one's, of the buffers of a window."""
    is_in_key = values.numel() and values.data_ptr() == keys.data_ptr()
    return keys.shape[3] if is_in_key else values.shape[3]


def _check_cold(query: torch.Tensor, rows: HostRows, valid: torch.Tensor, value_dim: int) -> None:
    """ValueError where cold rows or their mask are not for this query and its window's values."""
    batch, _, _, key_dim = query.shape
    dtype = query.dtype if rows.coding_address else rows.dtype
    if dtype != query.dtype or (rows.key_dim, rows.value_dim) != (key_dim, value_dim):
        raise ValueError(
            f"cold rows are {rows.dtype} of {rows.key_dim} + {rows.value_dim} dims, the window's "
            f"are {query.dtype} of {key_dim} + {value_dim}: pass rows of one form"
        )
    if valid.dtype != torch.bool or valid.shape[0] != batch or rows.table.shape[0] != batch:
        raise ValueError(
            f"valid is {valid.dtype} {tuple(valid.shape)}, the page table "
            f"{tuple(rows.table.shape)}"
            f": pass a bool mask and a table for a batch of {batch}"
        )


def _check_ids(query: torch.Tensor, ids: torch.Tensor, heads: int) -> None:
    """ValueError where ids that are given are not for this query and ``heads`` KV heads."""
    batch, query_heads, queries, _ = query.shape
    fits = ids.ndim == 4 and (ids.shape[0], ids.shape[2]) == (batch, queries) and ids.shape[1]
    if ids.dtype != torch.int32 or not fits or query_heads % ids.shape[1] or ids.shape[1] % heads:
        raise ValueError(
            f"ids is {ids.dtype} {tuple(ids.shape)}: pass int32 [{batch}, {heads} or a multiple "
            f"that divides {query_heads}, {queries}, k]"
        )


def _capacity(rows: torch.Tensor, dim: int) -> int:
    """Tokens from one head to the next, ``dim`` numbers each; -1 where ``rows`` lie otherwise."""
    batch, heads, count, _ = rows.shape
    row_stride, head_stride, token_stride, stride = rows.stride()
    capacity = count
    if heads > 1:
        capacity = head_stride // dim
    elif batch > 1:
        capacity = row_stride // dim
    # Strides of dimensions of one element mean nothing.
    fits = (
        (rows.shape[3] == 1 or stride == 1)
        and (count <= 1 or token_stride == dim)
        and (heads == 1 or head_stride == capacity * dim)
        and (batch == 1 or row_stride == heads * capacity * dim)
    )
    return capacity if fits else -1
