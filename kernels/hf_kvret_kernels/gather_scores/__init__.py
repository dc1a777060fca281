"""Exact scores of chosen keys of a paged key/value store."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import launching_on
from hf_kvret_kernels.gather_attention import check_chosen_rows, choose_row_backend
from hf_kvret_kernels.gather_scores import naive
from hf_kvret_kernels.paged import PagedRows

__all__ = ["gather_scores"]


def gather_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Score of each query with each of its ids: ``[B, Hq, Q, K]`` fp32, -inf for -1.

    Reads keys alone. A score is ``scale * q.k``, capped where ``softcap`` is given; its sum is
    fp32.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype, contiguous in the last dimension.
        rows: the paged keys and values; its table lies on the query's device, its chunks there
            too or in pinned host memory (Triton only).
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none. With H = Hkv one selection serves
            the ``Hq / Hkv`` query heads of a group and each key is read once; with H = Hq every
            query head has its own. K may be 0. A token may be named more than once.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        backend: ``"naive"``, torch, the reference; ``"triton"``; ``"cpp"``, the compiled library of
            ``host_attention``, for CPU tensors; ``"auto"``, Triton for CUDA tensors, for CPU
            tensors the library where there is one, else torch.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        WrongIdError: a ValueError, on a CPU: an id of no token.
        ImportError: ``"triton"`` without Triton, ``"cpp"`` without the library.
        MemoryError: no room for the library's work space.

    Triton, which may not look at the data, takes other ids for -1.
    """
    check_chosen_rows(query, rows, ids, softcap)
    backend_name = choose_row_backend(backend, query)
    if backend_name == "naive":
        return naive.gather_scores(query, rows, ids, scale, softcap)
    if backend_name == "cpp":
        return host_library.score(query, rows, ids, scale, softcap)
    from hf_kvret_kernels.gather_scores import triton

    with launching_on(query):
        return triton.gather_scores(query, rows, ids, scale, softcap)
