"""Exact attention over chosen rows in host memory, computed where they are.

The compiled library (``kernels/csrc``) reads each row once for all query heads that share a
selection, and asks for rows ahead of their use. Where it was not built, torch does the same work
more slowly.
"""

from __future__ import annotations

from typing import Literal

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.gather_attention import check_chosen_rows
from hf_kvret_kernels.gather_attention.naive import gather_attention, gather_scores
from hf_kvret_kernels.host_attention import naive
from hf_kvret_kernels.host_library import paths, why_not
from hf_kvret_kernels.paged import PagedRows

__all__ = ["host_attention", "host_rank", "host_scores", "paths", "why_not"]

BACKENDS = ("auto", "naive", "cpp")


def host_attention(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
    backend: str = "auto",
    path: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name, on the CPU.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype, contiguous in the last dimension.
        rows: the paged keys and values; table and chunks in host memory, pinned or not.
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none. With H = Hkv one selection serves
            the ``Hq / Hkv`` query heads of a group and each row is read once; with H = Hq every
            query head has its own. K may be 0. A token named twice counts twice.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        threads: of the library, the caller's among them. Default: ``torch.get_num_threads()``, but
            no more than the process has processors. The naive backend uses torch's threads.
        backend: ``"cpp"``, the compiled library; ``"naive"``, torch; ``"auto"``, the library
            where there is one.
        path: ``"avx512_bf16"``, ``"avx512"``, ``"avx2"`` or ``"portable"`` code of the library,
            which it then needs; None for the best that the processor runs.

    Returns:
        ``out [B, Hq, Q, Dv]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log). A query without rows
        has out 0 and lse -inf. All arithmetic is fp32; exp is accurate to 1e-6 relative, and
        weights below exp(-87.3) of the largest are 0. With ``"avx512_bf16"``, elements of bf16
        queries and keys below 2^-126 count as 0. NaN or Inf in a row make the queries that
        read it NaN or Inf, and no others.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, gradients, an
            unknown backend or path, a path that the processor lacks, threads below 1.
        ImportError: ``"cpp"`` without the library; see ``why_not()``.
        MemoryError: no room for the work space.

    Safe from several Python threads at once, which it lets run. A process that was forked beside
    running threads may hang, as of any library with locks: start processes by "spawn".
    """
    _check(query, rows, ids, softcap)
    if _choose(backend, threads, path) == "naive":
        return gather_attention(query, rows, ids, scale, softcap)
    return host_library.attend(query, rows, ids, scale, softcap, threads, path)


def host_scores(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    threads: int | None = None,
    backend: str = "auto",
    path: str | None = None,
) -> torch.Tensor:
    """Score of each query with each of its ids: ``[B, Hq, Q, K]`` fp32, -inf for holes.

    Reads keys alone. A score is ``scale * q.k``, capped where ``softcap`` is given. Arguments and
    errors are those of ``host_attention``.
    """
    _check(query, rows, ids, softcap)
    if _choose(backend, threads, path) == "naive":
        return gather_scores(query, rows, ids, scale, softcap)
    return host_library.score(query, rows, ids, scale, softcap, threads, path)


def host_rank(
    scores: torch.Tensor,
    ids: torch.Tensor,
    count: int,
    *,
    threads: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The ``count`` best of some tokens, best first, then -1: ``[B, H, Q, count]`` int32.

    A token is as relevant as the largest of the softmax weights, over the tokens named, that the
    ``Hq / H`` query heads of its ids give it; of equal ones the first named comes first. Tokens
    whose score is NaN or -inf are never chosen.

    Args:
        scores: ``[B, Hq, Q, K]`` fp32, as ``host_scores`` gives them.
        ids: ``[B, H, Q, K]`` int32, -1 for none; Hq is a multiple of H.
        count: at least 0; may exceed K.
        threads: as of ``host_attention``.
        backend: as of ``host_attention``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        ImportError, MemoryError: as of ``host_attention``.
    """
    batch, heads, queries, id_count = ids.shape if ids.ndim == 4 else (0, 0, 0, 0)
    if ids.dtype != torch.int32 or not heads:
        raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}: pass int32 [B, H, Q, K]")
    fits = scores.ndim == 4 and scores.shape[1] and not scores.shape[1] % heads
    if (
        scores.dtype != torch.float32
        or not fits
        or ((scores.shape[0], *scores.shape[2:]) != (batch, queries, id_count))
    ):
        raise ValueError(
            f"scores is {scores.dtype} {tuple(scores.shape)}: pass fp32 [{batch}, a multiple of "
            f"{heads}, {queries}, {id_count}]"
        )
    if scores.device.type != "cpu" or ids.device.type != "cpu":
        raise ValueError(
            f"scores are on {scores.device}, ids on {ids.device}: copy both to the CPU"
        )
    if count < 0:
        raise ValueError(f"count={count}: pass 0 or more")
    if _choose(backend, threads, None) == "naive":
        return naive.host_rank(scores, ids, count)
    best = ids.new_empty(batch, heads, queries, count)
    host_library.rank(scores, ids, best, threads)
    return best


def _check(query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, softcap: float | None) -> None:
    places = (("query", query), ("the page table", rows.table), ("the rows", rows.chunks[0]))
    for name, tensor in places:
        if not tensor.is_cpu:
            raise ValueError(
                f"{name} is on {tensor.device}: host attention reads host memory, copy it to the "
                "CPU or use gather_attention"
            )
    check_chosen_rows(query, rows, ids, softcap)


def _choose(backend: str, threads: int | None, path: str | None) -> Literal["naive", "cpp"]:
    """The backend that runs; also checks what is for the library alone."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: pass at least 1, or None for torch's number")
    if path is not None and path not in host_library.PATHS:
        raise ValueError(f"path={path!r}: choose one of {', '.join(host_library.PATHS)}, or None")
    if path is not None and backend == "naive":
        raise ValueError(f"path={path!r} is for the library: drop it, or use backend='cpp'")
    if backend == "naive" or (backend == "auto" and path is None and why_not()):
        return "naive"
    if path is not None and path not in host_library.paths():
        raise ValueError(
            f"path={path!r}: this processor or this build lacks it, choose one of "
            f"{', '.join(host_library.paths())}, or None"
        )
    host_library.load()
    return "cpp"
