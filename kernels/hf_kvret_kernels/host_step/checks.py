"""What a step's tensors must be for the library, which has their addresses alone."""

from __future__ import annotations

import torch

from hf_kvret_kernels.paged import PagedRows


def check_window(
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


def window_capacity(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Tokens from one head to the next in a window's buffers, see ``HostWindow``.

    ValueError where the buffers do not fit each other.
    """
    if keys.shape[:3] != values.shape[:3] or values.dtype != keys.dtype:
        raise ValueError(
            f"keys are {keys.dtype} {tuple(keys.shape)}, values {values.dtype} "
            f"{tuple(values.shape)}: pass rows of one dtype for the same tokens"
        )
    capacities = {_capacity(keys, keys.shape[3]), _capacity(values, value_row(keys, values))}
    if len(capacities) > 1 or min(capacities) < keys.shape[2]:
        raise ValueError(
            f"keys have strides {keys.stride()}, values {values.stride()}: pass contiguous "
            "[B, Hkv, capacity, D] buffers of one capacity, or views [:, :, :n] of such; values "
            "may be the first numbers of keys"
        )
    return capacities.pop()


def value_row(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Numbers from one token's value to the next one's, of the buffers of a window."""
    is_in_key = values.numel() and values.data_ptr() == keys.data_ptr()
    return keys.shape[3] if is_in_key else values.shape[3]


def check_cold(query: torch.Tensor, rows: PagedRows, valid: torch.Tensor, value_dim: int) -> None:
    """ValueError where cold rows or their mask are not for this query and its window's values."""
    batch, _, _, key_dim = query.shape
    if rows.dtype != query.dtype or (rows.key_dim, rows.value_dim) != (key_dim, value_dim):
        raise ValueError(
            f"cold rows are {rows.dtype} of {rows.key_dim} + {rows.value_dim} dims, the window's "
            f"are {query.dtype} of {key_dim} + {value_dim}: pass rows of one form"
        )
    if valid.dtype != torch.bool or valid.shape[0] != batch or rows.table.shape[0] != batch:
        raise ValueError(
            f"valid is {valid.dtype} {tuple(valid.shape)}, the page table {tuple(rows.table.shape)}"
            f": pass a bool mask and a table for a batch of {batch}"
        )


def check_ids(query: torch.Tensor, ids: torch.Tensor, heads: int) -> None:
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
