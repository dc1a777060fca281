"""A whole decode step of a layer in one call: search, attention to what it finds, and the window.

The compiled library (``kernels/csrc``) does on the CPU what an index's search, a store's attention,
the window's and their merge do one after the other. What a search means stands in the naive code of
its operations, as ``paris/naive.py``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from dataclasses import dataclass

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.host_library import why_not as why_not
from hf_kvret_kernels.host_step.searches import (
    CodebookSearch as CodebookSearch,
    FlatSearch as FlatSearch,
    Generation as Generation,
    GivenIds as GivenIds,
    HostSearch as HostSearch,
    ListSearch as ListSearch,
    ParisSearch as ParisSearch,
    ProxySearch as ProxySearch,
)
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.paged import HostRows, WithoutAddresses

# hfk_step of csrc/hf_kvret_host.h: hfk_request as of ``host_library.pack_request``; window; valid,
# its stride and the cold tokens; addresses of search, rest, sinks, the count of chosen tokens, the
# result, a new key and a new value; kind of the search, a reserved number.
_STEP = struct.Struct("@7P14q2d4i3P4qP2q7P2i")
# Indices of its words of 8 bytes: the query, the result in fp32, the window's length, the result in
# the query's dtype, a new key and a new value.
_QUERY, _OUT, _LENGTH, _RESULT, _NEW_KEY, _NEW_VALUE = 0, 4, 30, 39, 40, 41


@dataclass(eq=False)
class HostWindow(WithoutAddresses):
    """Rows that all queries attend to. May be used for step after step, with other lengths.

    Attributes:
        keys: ``[B, Hkv, capacity, Dk]`` of the query's dtype, contiguous; or its first rows, a
            view ``[:, :, :n]``.
        values: ``[B, Hkv, capacity, Dv]``, the same; or the first numbers of ``keys``, a view
            ``keys[..., :Dv]``.
        length: rows held; of Q queries the one numbered i sees all but the last ``Q - 1 - i``.
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

    @functools.cached_property
    def _addresses(self) -> tuple[int, int]:
        return self.keys.data_ptr(), self.values.data_ptr()

    @property
    def in_key(self) -> bool:
        """Whether values are the first numbers of keys."""
        return self._addresses[0] == self._addresses[1]


@dataclass(frozen=True, eq=False)
class HostCold(WithoutAddresses):
    """Cold tokens, some of which each query chooses. May be used for step after step, as they are.

    Attributes:
        rows: their keys and values, in host memory; coded ones by HIGGS.
        search: knows the same tokens, in the same batch rows and KV heads; or ``GivenIds``, then
            ``valid`` and ``budget`` are not looked at.
        valid: ``[B, n]`` bool, False for tokens that are never chosen.
        budget: how many of them a query chooses, at least 1.
        rest: what stands for those that it does not choose; None: nothing.
    """

    rows: HostRows
    search: HostSearch
    valid: torch.Tensor
    budget: int
    rest: MeanToken | None = None

    @functools.cached_property
    def packed(self) -> tuple[bytes, tuple[int, ...], tuple[int, ...], tuple[int, ...], object]:
        """The search; of ``hfk_step`` rows, sizes and choice; and what must live for these."""
        rows, valid, table = self.rows, self.valid, self.rows.table.contiguous()
        addresses = rows.addresses() if rows.page_address is None else rows.page_address
        row_sizes = rows.token_count, rows.width, rows.value_start
        sizes = table.shape[1], rows.page_len, addresses.shape[0], *row_sizes
        valid = valid if valid.stride(1) == 1 else valid.contiguous()
        packed = self.search.packed
        rest = None if self.rest is None else self.rest.packed
        structs = [ctypes.c_char_p(packed), ctypes.c_char_p(rest)]
        described = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in structs)
        rows_at = table.data_ptr(), addresses.data_ptr(), rows.coding_address
        chosen = valid.data_ptr(), valid.stride(0), valid.shape[1], *described
        return packed, rows_at, sizes, chosen, (table, addresses, valid, structs)


def library() -> ctypes.CDLL | None:
    """The library; None where it can't be used, see ``why_not``."""
    found = host_library.opened(os.environ.get(host_library.PATH_VARIABLE))
    return None if isinstance(found, str) else found


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

    Returns:
        ``out [B, Hq, Q, Dv]`` of ``dtype``, and the chosen ids ``[B, H, Q, budget]`` int32, -1
        where fewer tokens are valid, H the heads that choose; those of ``GivenIds`` as they are.

    Raises:
        ImportError: no library; see ``why_not()``.
        ValueError: another ``dtype`` than these two, a query of another dtype or head dim than the
            rows, windows or cold rows that do not fit each other, ids that a short page table does
            not lead to.
        WrongIdError: a ValueError, for an id of no token, or a code of no codeword.
        MemoryError: no room for the work space.
    """
    if dtype not in (torch.float32, query.dtype):
        raise ValueError(f"dtype {dtype}: a step writes float32 or its query's {query.dtype}")
    _check_window(query, window)
    if cold is not None:
        _check_cold(query, cold, window)
    scores = scale, softcap, sink_logits
    return run_unchecked(host_library.load(), query, window, cold, scores, selected, dtype)


def run_unchecked(
    library: ctypes.CDLL,
    query: torch.Tensor,
    window: HostWindow,
    cold: HostCold | None,
    scores: tuple[float, float | None, torch.Tensor | None],
    selected: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run_step`` for a caller whose window and rows fit each other by how they were made.

    ``scores``: scale, soft cap and sink logits. What an index says is checked here, too.
    """
    query = query.contiguous()
    batch, query_heads, queries, _ = query.shape
    # The results have the query's device and fixed dtypes, whatever torch's defaults are.
    out = query.new_empty(batch, query_heads, queries, window.values.shape[3], dtype=dtype)
    if cold is None:
        ids = query.new_empty(batch, window.keys.shape[1], queries, 0, dtype=torch.int32)
    elif isinstance(cold.search, GivenIds):
        ids = cold.search.ids.contiguous()
        _check_ids(query, ids, window.keys.shape[1])
    else:
        known, count = cold.search.token_count, cold.valid.shape[1]
        if known is not None and known != count:
            raise ValueError(
                f"the search knows {known} tokens, valid covers {count}: an index has to hold "
                "every token that was added"
            )
        heads = cold.search.heads or window.keys.shape[1]
        ids = query.new_empty(batch, heads, queries, cold.budget, dtype=torch.int32)
    threads = min(torch.get_num_threads(), host_library.PROCESSORS)
    step, _keep = _pack_step(query, window, cold, scores, ids, out, selected, threads)
    status = library.hfk_run_step(step)
    if status:
        host_library.check(status, "hfk_run_step", threads)
        if cold is not None:
            if isinstance(cold.search, CodebookSearch):
                cold.search.check(cold.valid)
            cold.rows.check_range(ids)
        raise RuntimeError(
            "ids or page table changed while they were read: do not write to them in another thread"
        )
    return out, ids


def _pack_step(
    query: torch.Tensor,
    window: HostWindow,
    cold: HostCold | None,
    scores: tuple[float, float | None, torch.Tensor | None],
    ids: torch.Tensor,
    out: torch.Tensor,
    selected: torch.Tensor | None,
    threads: int,
) -> tuple[bytes, tuple[object, ...]]:
    """``hfk_step``, and what must live until the call is over.

    ``scores``: scale, soft cap and sink logits.
    """
    scale, softcap, sink_logits = scores
    batch, query_heads, queries, key_dim = query.shape
    value_dim, near = window.values.shape[3], window.valid
    if near is not None and near.stride(1) != 1:
        near = near.contiguous()
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    # Without cold tokens no row is read.
    none = b"", (0, 0, 0), (0, 1, 0, 0, key_dim + value_dim, key_dim), (0,) * 5, None
    _, rows_at, row_sizes, chosen, _ = none if cold is None else cold.packed
    kind, in_files = (0, False) if cold is None else (cold.search.kind, cold.rows.in_files)
    is_fp32, out_at = out.dtype == torch.float32, out.data_ptr()
    step = _STEP.pack(
        query.data_ptr(),
        ids.data_ptr(),
        *rows_at[:2],
        out_at if is_fp32 else 0,
        0,
        rows_at[2],
        *(batch, query_heads, ids.shape[1], window.keys.shape[1], queries, ids.shape[3]),
        *(key_dim, value_dim, *row_sizes),
        *(scale, softcap or 0.0, host_library.DTYPES[query.dtype]),
        host_library.path_number(os.environ.get(host_library.ISA_VARIABLE)),
        *(threads, in_files),
        *window._addresses,
        0 if near is None else near.data_ptr(),
        0 if near is None else near.stride(0),
        *(window.capacity, window.length, window.value_row),
        *chosen,
        0 if sink_logits is None else sink_logits.data_ptr(),
        0 if selected is None else selected.data_ptr(),
        0 if is_fp32 else out_at,
        *(0, 0, kind, 0),
    )
    return step, (cold, near, sink_logits)


class PackedStep:
    """Steps of one query that differ in it and in the window's newest token alone.

    Arguments are those of ``run_unchecked``: what the steps have in common. What they hold must
    stay where it is.

    Attributes:
        form: what the caller has to find equal before each of them.
        parts: what it has to find in its place.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        query: torch.Tensor,
        window: HostWindow,
        cold: HostCold,
        scores: tuple[float, float | None, torch.Tensor | None],
        selected: torch.Tensor,
    ) -> None:
        batch, heads = query.shape[:2]
        self._shape = batch, 1, heads, window.values.shape[3]
        self._library, self._in_key = library, window.in_key
        id_heads = cold.search.heads or window.keys.shape[1]
        ids = query.new_empty(batch, id_heads, 1, cold.budget, dtype=torch.int32)
        threads = min(torch.get_num_threads(), host_library.PROCESSORS)
        self.form: tuple[object, ...] = ()
        self.parts: tuple[object, ...] = ()
        out = query.new_empty(self._shape)
        packed = _pack_step(query, window, cold, scores, ids, out, selected, threads)
        self._step, self._keep = ctypes.create_string_buffer(packed[0]), (packed[1], ids, selected)
        self._words = (ctypes.c_int64 * (_STEP.size // 8)).from_buffer(self._step)
        self._out_at = _OUT if query.dtype == torch.float32 else _RESULT

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """None: what a copy of its owner holds lies elsewhere."""

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int
    ) -> torch.Tensor | None:
        """The step of ``query [B, Hq, 1, Dk]`` with ``length`` rows in the window.

        The last of them is written first: ``key [B, Hkv, 1, Dk]`` and ``value [B, Hkv, 1, Dv]``.
        Returns ``[B, 1, Hq, Dv]`` in the query's dtype; None where it can't be done, and nothing
        was chosen or counted.
        """
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out, words = query.new_empty(self._shape), self._words
        words[_QUERY], words[self._out_at] = query.data_ptr(), out.data_ptr()
        words[_NEW_KEY], words[_LENGTH] = key.data_ptr(), length
        words[_NEW_VALUE] = 0 if self._in_key else value.data_ptr()
        return None if self._library.hfk_run_step(self._step) else out


def _check_window(query: torch.Tensor, window: HostWindow) -> None:
    """ValueError where a window's rows are not for this query."""
    keys, length = window.keys, window.length
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
    if length and not queries <= length <= capacity:
        raise ValueError(
            f"length={length}: {queries} queries are among the rows held, and the buffers have "
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


def _check_cold(query: torch.Tensor, cold: HostCold, window: HostWindow) -> None:
    """ValueError where cold rows or their mask are not for this query and window."""
    batch, _, _, key_dim = query.shape
    rows, valid, value_dim = cold.rows, cold.valid, window.values.shape[3]
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
    if cold.rest is not None:
        cold.rest.check(batch, window.keys.shape[1], key_dim, value_dim)


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
