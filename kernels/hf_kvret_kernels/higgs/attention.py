"""Attention over chosen rows that are kept coded."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import choose_backend, launching_on
from hf_kvret_kernels.gather_attention import check_chosen_rows, naive
from hf_kvret_kernels.higgs.codec import Codec
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows


def attend(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    codec: Codec,
    *,
    key_dim: int,
    value_dim: int,
    scale: float,
    softcap: float | None = None,
    value_in_key: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name, decoded on the way.

    A row holds, for one token and KV head, four runs of bytes: codes of the key, codes of the
    value, scales of the key, scales of the value, each as ``codec.encode`` makes them of the
    ``key_dim`` or ``value_dim`` numbers. ``rows.key_dim`` is the length of both codes; scales lie
    apart from them (``rows.apart``), so that codes are aligned to their own length.

    The Triton kernel never forms a key or a value: with HIGGS the query is transformed instead of
    the keys, values are summed up as they lie, and the sum is transformed back, once for each
    chunk of the ids. This needs groups within a head.

    Args:
        query: ``[B, Hq, Q, key_dim]`` fp32, bf16 or fp16, contiguous in the last dimension.
        rows: the paged bytes; its table lies on the query's device, its chunks there too or in
            pinned host memory (Triton only).
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none, distinct otherwise; H is Hkv, then
            one selection serves a group of query heads, or Hq. K may be 0.
        codec: what the rows were encoded with; its group divides both dims.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        value_in_key: values are the first numbers of keys, and rows hold codes and scales of keys
            alone.
        backend: ``"auto"``, ``"naive"`` (decodes every row to fp32) or ``"triton"``.

    Returns:
        ``out [B, Hq, Q, value_dim]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log) on the query's
        device. A query without rows has out 0 and lse -inf. Softmax and sums are fp32; the Triton
        kernel rounds what it multiplies to the query's dtype: the transformed query, and with one
        group of HIGGS a head grid points and softmax weights times scales, else softmax weights
        and scaled numbers, which in fp16 overflow from scales of 19000 on.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, rows of another codec's size, an
            unknown backend, gradients.
        WrongIdError: a ValueError, with ``"naive"``: an id of no token.
        ImportError: ``"triton"`` without Triton.

    Triton, which may not look at the data, takes other ids for -1.
    """
    partials = attend_partials(
        query,
        rows,
        ids,
        codec,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        softcap=softcap,
        value_in_key=value_in_key,
        backend=backend,
    )
    # Only Triton gives several.
    return partials("triton")


def attend_partials(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    codec: Codec,
    *,
    key_dim: int,
    value_dim: int,
    scale: float,
    softcap: float | None = None,
    value_in_key: bool = False,
    backend: str = "auto",
) -> Partials:
    """``attend``, its chunks left unmerged: a launch less where others follow.

    Arguments and errors are the same. On a CPU it is always one chunk, without tickets.
    """
    _check_rows(rows, codec, key_dim, value_dim, value_in_key)
    check_chosen_rows(query, rows, ids, softcap, coded_dim=key_dim)
    if choose_backend(backend, query) == "triton":
        from hf_kvret_kernels.higgs import triton_attend

        with launching_on(query):
            return triton_attend.attend_partials(
                query, rows, ids, codec, key_dim, value_dim, scale, softcap, None, value_in_key
            )
    codes, scales = rows.gather_with_torch(ids)
    if value_in_key:
        keys = codec.decode(codes, scales, backend="naive")
        values = keys[..., :value_dim]
    else:
        dims = key_dim, value_dim
        code_parts = codes.split([codec.code_bytes(dim) for dim in dims], -1)
        scale_parts = scales.split([codec.scale_bytes(dim) for dim in dims], -1)
        keys, values = (
            codec.decode(*parts, backend="naive")
            for parts in zip(code_parts, scale_parts, strict=True)
        )
    return Partials.whole(*naive.attention(query, keys, values, ids, scale, softcap))


def _check_rows(
    rows: PagedRows, codec: Codec, key_dim: int, value_dim: int, value_in_key: bool
) -> None:
    dims = [key_dim] if value_in_key else [key_dim, value_dim]
    code_bytes = sum(map(codec.code_bytes, dims))
    scale_bytes = sum(map(codec.scale_bytes, dims))
    if value_in_key and (value_dim > key_dim or value_dim % codec.group):
        raise ValueError(
            f"value_dim={value_dim} with value_in_key: values are whole groups of {codec.group}, "
            f"and no longer than keys of {key_dim}"
        )
    if rows.dtype != torch.uint8:
        raise ValueError(f"rows are {rows.dtype}: pass coded rows, bytes (uint8)")
    if (rows.key_dim, rows.value_dim) != (code_bytes, scale_bytes):
        raise ValueError(
            f"rows have {rows.key_dim} bytes of codes and {rows.value_dim} of scales; {codec} has "
            f"{code_bytes} and {scale_bytes} for key_dim={key_dim} and value_dim={value_dim}"
        )
