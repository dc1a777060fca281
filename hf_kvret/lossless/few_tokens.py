"""Products of few tokens and bf16 weights, on processors without instructions for bf16.

torch multiplies some dozens of rows in bf16 there at a tenth of the rate of fp32, which an exact
pass would pay in each round. To the compiled library a weight is rows of keys and the tokens are
heads that share them: it reads them once, converts them in the cache, and sums in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.paged import PagedRows

_MOST = 64


def fast_products() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``torch.nn.functional.linear`` goes through the library where it is quicker."""
    is_quicker = not _has_bf16() and preferred() is None and not host_library.why_not()
    return _FastProducts() if is_quicker else contextlib.nullcontext()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [.., n, K]`` times ``weight [N, K]`` plus ``bias [N]``, all bf16: ``[.., n, N]`` bf16."""
    outputs, depth = weight.shape
    page = torch.zeros(1, 1, dtype=torch.int32)
    rows = PagedRows([weight.view(1, 1, outputs, depth)], page, depth, value_in_key=depth)
    ids = torch.arange(outputs, dtype=torch.int32).view(1, 1, 1, outputs)
    sums = host_library.score(x.reshape(1, -1, 1, depth), rows, ids, 1.0, None)
    sums = sums.view(*x.shape[:-1], outputs)
    return (sums if bias is None else sums + bias).to(x.dtype)


class _FastProducts(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear and not kwargs and _fits(*args):
            return linear(*args)
        return func(*args, **(kwargs or {}))


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether these are few tokens and plain weights in bf16 on the CPU."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_contiguous()
    few = 1 < x.numel() // x.shape[-1] <= _MOST
    return (
        plain and few and x.is_cpu and weight.is_cpu and {x.dtype, weight.dtype} == {torch.bfloat16}
    )


@functools.cache
def _has_bf16() -> bool:
    """Whether the processor multiplies bf16; others than x86 are left to torch."""
    cpu = torch.cpu
    x86 = cpu._is_avx2_supported()
    return not x86 or cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()
