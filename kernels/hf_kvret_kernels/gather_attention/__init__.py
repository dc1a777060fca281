"""Exact attention over chosen rows of a paged key/value store, and the scores of their keys."""

from __future__ import annotations

import importlib

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import choose_backend, launching_on, run
from hf_kvret_kernels.gather_attention import naive
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import HostRows, PagedRows

__all__ = ["gather_attention", "gather_partials", "gather_scores"]


def gather_attention(
    query: torch.Tensor,
    rows: HostRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype, of any where they are coded; contiguous in the
            last dimension.
        rows: ``PagedRows``, or ``higgs.CodedRows``, which are decoded on the way; the table lies on
            the query's device, chunks there too or in pinned host memory (Triton only).
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
    rows: HostRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partials:
    """``gather_attention``, its chunks left unmerged: a launch less where others follow.

    Arguments and errors are the same. On a CPU it is always one chunk, without tickets.
    """
    rows.check(query, ids, softcap)
    if backend not in ("cpp", "host") and choose_backend(backend, query) == "triton":
        with launching_on(query):
            triton = importlib.import_module(rows.triton_module)
            return triton.gather_partials(query, rows, ids, scale, softcap)
    if host_library.is_asked(backend, query):
        return Partials.whole(*host_library.attend(query, rows, ids, scale, softcap))
    return Partials.whole(*naive.gather_attention(query, rows, ids, scale, softcap))


def gather_scores(
    query: torch.Tensor,
    rows: HostRows,
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
    rows.check(query, ids, softcap)
    if host_library.is_asked(backend, query):
        return host_library.score(query, rows, ids, scale, softcap)
    backend = choose_backend("naive" if backend == "host" else backend, query)
    if backend == "triton" and not isinstance(rows, PagedRows):
        raise ValueError("Triton has no scores of coded rows: decode the keys that ids name")
    return run(__name__, "gather_scores", backend, query, rows, ids, scale, softcap)
