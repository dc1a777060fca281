"""Exact attention over chosen rows of a paged key/value store, and the scores of their keys."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import (
    check_attention_inputs,
    check_softcap,
    choose_backend,
    launching_on,
    run,
)
from hf_kvret_kernels.gather_attention import naive
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows

__all__ = [
    "check_chosen_rows",
    "gather_attention",
    "gather_partials",
    "gather_scores",
]


def gather_attention(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype, contiguous in the last dimension.
        rows: the paged keys and values; its table lies on the query's device, its chunks there
            too or in pinned host memory (Triton only).
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none, distinct otherwise. With H = Hkv one
            selection serves the ``Hq / Hkv`` query heads of a group and each row is read once;
            with H = Hq every query head has its own. K may be 0.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        backend: ``"naive"``, torch, the reference; ``"triton"``; ``"cpp"``, the compiled library,
            for CPU tensors; ``"host"``, the library where there is one, else torch; ``"auto"``,
            Triton for CUDA tensors, ``"host"`` for CPU tensors.

    Returns:
        ``out [B, Hq, Q, Dv]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log) on the query's device.
        A query without rows has out 0 and lse -inf. Softmax and sums are fp32; the Triton kernel
        rounds softmax weights to the rows' dtype before they meet the values. In the library, exp
        is accurate to 1e-6 relative, and weights below exp(-87.3) of the largest are 0; with its
        instructions ``avx512_bf16``, elements of bf16 queries and keys below 2^-126 count as 0.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients, an
            instruction set that ``HF_KVRET_CPU_PATH`` names and the processor lacks.
        WrongIdError: a ValueError, on a CPU: an id of no token.
        ImportError: ``"triton"`` without Triton, ``"cpp"`` without the library.
        MemoryError: no room for the library's work space.

    Triton, which may not look at the data, takes other ids for -1. The library is safe from several
    Python threads at once, which it lets run. A process that was forked beside running threads may
    hang, as of any library with locks: start processes by "spawn".
    """
    partials = gather_partials(query, rows, ids, scale=scale, softcap=softcap, backend=backend)
    # Only Triton gives several.
    return partials("triton")


def gather_partials(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partials:
    """``gather_attention``, its chunks left unmerged: a launch less where others follow.

    Arguments and errors are the same. On a CPU it is always one chunk, without tickets.
    """
    check_chosen_rows(query, rows, ids, softcap)
    if backend not in ("cpp", "host") and choose_backend(backend, query) == "triton":
        from hf_kvret_kernels.gather_attention import triton

        with launching_on(query):
            return triton.gather_partials(query, rows, ids, scale, softcap)
    if host_library.is_asked(backend, query):
        return Partials.whole(*host_library.attend(query, rows, ids, scale, softcap))
    return Partials.whole(*naive.gather_attention(query, rows, ids, scale, softcap))


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
    fp32. Arguments and errors are those of ``gather_attention``; a token may be named more than
    once.
    """
    check_chosen_rows(query, rows, ids, softcap)
    if host_library.is_asked(backend, query):
        return host_library.score(query, rows, ids, scale, softcap)
    backend = "naive" if backend == "host" else backend
    return run(__name__, "gather_scores", backend, query, rows, ids, scale, softcap)


def check_chosen_rows(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    softcap: float | None,
    coded_dim: int | None = None,
) -> None:
    """Check the arguments of operations on the rows that ids name.

    Args:
        query, rows, ids, softcap: as of ``gather_attention``.
        coded_dim: Dk of the keys that coded rows stand for; None where rows are of the query's
            dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, gradients, a cap that is no cap.
    """
    check_attention_inputs(query=query)
    rows.check_ids(ids)
    if rows.apart is (coded_dim is None):
        raise ValueError(
            f"rows have apart={rows.apart}: keys and values must lie "
            f"{'side by side' if coded_dim is None else 'apart, as codes and scales do'}"
        )
    batch, heads, queries, width = query.shape
    dtype = rows.dtype if coded_dim is None else query.dtype
    key_dim = rows.key_dim if coded_dim is None else coded_dim
    if query.dtype != dtype or query.device != rows.table.device or width != key_dim:
        raise ValueError(
            f"query is {query.dtype} on {query.device} with Dk={width}, the rows are {rows.dtype} "
            f"with a page table on {rows.table.device} and Dk={key_dim}: they must agree"
        )
    if ids.shape[0] != batch or ids.shape[2] != queries or ids.shape[1] not in (rows.heads, heads):
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}: pass [{batch}, {rows.heads} or {heads}, {queries}, "
            f"K] for a query of shape {tuple(query.shape)}"
        )
    if heads % rows.heads:
        raise ValueError(f"query has {heads} heads, no multiple of the rows' {rows.heads}")
    check_softcap(softcap)
