"""Attention over chosen rows that are kept coded."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import choose_backend, launching_on
from hf_kvret_kernels.gather_attention import naive
from hf_kvret_kernels.higgs.coded_rows import CodedRows
from hf_kvret_kernels.merge import Partials


def attend(
    query: torch.Tensor,
    rows: CodedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name, decoded on the way.

    The kernels never form a key or a value: the query is transformed instead of the
    keys, values are summed up as they lie, and the sum is transformed back, in Triton once for each
    chunk of the ids. This needs groups within a head.

    Args:
        query: ``[B, Hq, Q, key_dim]`` fp32, bf16 or fp16, contiguous in the last dimension.
        rows: the coded rows; their table lies on the query's device, their chunks there too or in
            pinned host memory (Triton only).
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none, distinct otherwise; H is Hkv, then
            one selection serves a group of query heads, or Hq. K may be 0.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        backend: ``"auto"``, ``"naive"`` (decodes every row to fp32), ``"cpp"`` (the compiled
            library; ``"auto"`` on a CPU that has it) or ``"triton"``.

    Returns:
        ``out [B, Hq, Q, value_dim]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log) on the query's
        device. A query without rows has out 0 and lse -inf. Softmax and sums are fp32; the Triton
        kernel rounds what it multiplies to the query's dtype: the transformed query, and with one
        group a head grid points and softmax weights times scales, else softmax weights
        and scaled numbers, which in fp16 overflow from scales of 19000 on.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, ``"cpp"`` for
            another device, gradients.
        WrongIdError: a ValueError, with ``"naive"`` and ``"cpp"``: an id of no token.
        ImportError: ``"triton"`` without Triton, ``"cpp"`` without the library.

    Triton, which may not look at the data, takes other ids for -1.
    """
    # Only Triton gives several.
    partials = attend_partials(query, rows, ids, scale=scale, softcap=softcap, backend=backend)
    return partials("triton")


def host_scores(
    query: torch.Tensor,
    rows: CodedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor | None:
    """Logits ``[B, Hq, Q, K]`` fp32 of the keys that ids name, -inf for -1, by the library.

    None where ``attend`` would not take it, either. Arguments and errors are the same.
    """
    rows.check(query, ids, softcap)
    if not host_library.is_asked("auto", query):
        return None
    return host_library.score(query, rows, ids, scale, softcap)


def attend_partials(
    query: torch.Tensor,
    rows: CodedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partials:
    """``attend``, its chunks left unmerged: a launch less where others follow.

    Arguments and errors are the same. On a CPU it is always one chunk, without tickets.
    """
    rows.check(query, ids, softcap)
    if host_library.is_asked(backend, query):
        return Partials.whole(*host_library.attend(query, rows, ids, scale, softcap))
    if choose_backend(backend, query) == "triton":
        from hf_kvret_kernels.higgs import triton_attend

        with launching_on(query):
            return triton_attend.attend_partials(query, rows, ids, scale, softcap)
    return Partials.whole(*naive.attention(query, *rows.gather(ids), ids, scale, softcap))
