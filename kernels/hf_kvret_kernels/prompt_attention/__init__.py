"""Block-wise attention over dense keys and values, with padding per row."""

from __future__ import annotations

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import DenseCall, choose_backend, launching_on, preferred, run
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention import naive, torch_flash

__all__ = ["compiled", "prompt_attention", "prompt_partials"]


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with an online softmax: no matrix of ``[Q, T]`` is ever formed.

    Args:
        query: ``[B, Hq, Q, Dk]``; key ``[B, Hkv, T, Dk]``; value ``[B, Hkv, T, Dv]``: one dtype
            (fp32, bf16, fp16) and device, any strides with a contiguous last dimension, Hq a
            multiple of Hkv, dimensions up to 256. T and Q may be 0.
        scale: factor of the dot products.
        causal_offset: query i sees keys ``j <= causal_offset + i``; may be negative. None: all.
        valid: ``[B, T]`` bool, any strides, False for padding and holes; None: all are valid. What
            stands in rows that are not valid never matters, not even NaN.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        out_dtype: dtype of out; None means the query's.
        backend: ``"auto"``, ``"naive"``, ``"cpp"`` (the compiled library, on a CPU) or
            ``"triton"``. On a CPU ``"auto"`` is the compiled library, where ``compiled`` says
            so, else torch's flash attention, where it fits.

    Returns:
        ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]`` fp32 (natural log). A query that sees no key
        has out 0 and lse -inf. Softmax and sums are fp32. The Triton kernel, torch's flash
        attention and, for bf16, the library's ``avx512_bf16`` round softmax weights to the input
        dtype before they meet the values; for the last, numbers below 2^-126 count as 0. Without
        ``HF_KVRET_CPU_PATH`` that path multiplies bf16 on AMD's processors alone.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        ImportError: ``"triton"`` without Triton, or ``"cpp"`` without the library.
        MemoryError: ``"cpp"`` has no room for its work space.
    """
    call = DenseCall(query, key, value, scale, causal_offset, valid, softcap).check()
    out_dtype = query.dtype if out_dtype is None else out_dtype
    on_cpu = backend == "auto" and query.is_cpu and preferred() is None
    if on_cpu and not compiled(query) and torch_flash.fits(query, value, valid, softcap):
        return torch_flash.prompt_attention(call, out_dtype)
    if host_library.is_asked(backend, query):
        out, lse = host_library.attend_prompt(call)
        return out.to(out_dtype), lse
    return run(__name__, "prompt_attention", backend, call, out_dtype, on=query)


def compiled(query: torch.Tensor) -> bool:
    """Whether the compiled library is preferred for a long prompt of such queries on a CPU.

    It is, but for bf16 where torch has AMX.
    """
    if not query.is_cpu or preferred() is not None or host_library.why_not():
        return False
    return query.dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported()


def prompt_partials(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Partials:
    """``prompt_attention`` in fp32, its chunks left unmerged: a launch less where others follow.

    Arguments and errors are the same. In torch it is always one chunk.
    """
    call = DenseCall(query, key, value, scale, causal_offset, valid, softcap).check()
    if choose_backend(backend, query) == "naive":
        return Partials.whole(*naive.prompt_attention(call, torch.float32))
    from hf_kvret_kernels.prompt_attention import triton

    with launching_on(query):
        return triton.prompt_partials(call)
