"""Products of few tokens and weights of 16 bits, on processors without instructions for bf16.

torch reads such a weight there at half of the memory's rate for one token, and multiplies some
dozens at a tenth of the rate of fp32. The compiled library reads it once, converts it in the cache,
and sums in fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.paged import PagedRows

_MOST = 64
# From so many tokens on the kernel of attention is quicker, which multiplies panels.
_PANELS = 16
_HALVES = (torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, nn.Parameter)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [.., n, K]`` times ``weight [N, K]`` plus ``bias [N]``, of one dtype: ``[.., n, N]``."""
    outputs, depth = weight.shape
    if x.numel() < _PANELS * depth:
        return host_library.product(x, weight, bias)
    # A weight is rows of keys, and the tokens are heads that share them.
    page = torch.zeros(1, 1, dtype=torch.int32)
    rows = PagedRows([weight.view(1, 1, outputs, depth)], page, depth, value_in_key=depth)
    ids = torch.arange(outputs, dtype=torch.int32).view(1, 1, 1, outputs)
    sums = host_library.score(x.reshape(1, -1, 1, depth), rows, ids, 1.0, None)
    sums = sums.view(*x.shape[:-1], outputs)
    return (sums if bias is None else sums + bias).to(x.dtype)


def may_be_quicker(weight: torch.Tensor) -> bool:
    """Whether ``linear`` is quicker than torch with few tokens and ``weight``, here."""
    plain = type(weight) in _PLAIN and weight.is_cpu and weight.is_contiguous()
    is_half = plain and weight.dtype in _HALVES
    return is_half and not _has_bf16() and preferred() is None and not host_library.why_not()


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ``linear`` takes these, of which ``weight`` was one that ``may_be_quicker``."""
    given = (x, weight) if bias is None else (x, weight, bias)
    alike = all(type(one) in _PLAIN and one.is_cpu and one.dtype == x.dtype for one in given)
    if not alike or x.dtype not in _HALVES or weight.ndim != 2:
        return False
    outputs, depth = weight.shape
    whole = weight.is_contiguous() and (bias is None or bias.shape == (outputs,))
    return whole and x.shape[-1:] == (depth,) and 0 < x.numel() <= _MOST * depth


@functools.cache
def _has_bf16() -> bool:
    """Whether the processor multiplies bf16; others than x86 are left to torch."""
    cpu = torch.cpu
    x86 = cpu._is_avx2_supported()
    return not x86 or cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
