"""Products of few tokens and weights of 16 bits, where the compiled library is quicker than torch.

With one token torch reads such a weight at a third to a half of the memory's rate, also where the
processor multiplies bf16. Without instructions for it, torch multiplies some dozens of tokens at a
tenth of the rate of fp32. The compiled library reads a weight once, converts it in the processor's
cache, and sums in fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch._subclasses import FakeTensor

from hf_kvret_kernels import host_library
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.paged import PagedRows

# So many tokens at most, and where the processor multiplies the dtype itself.
_MOST, _FEW = 64, 4
# From so many tokens on the kernel of attention is quicker, which multiplies panels.
_PANELS = 16
_HALVES = (torch.bfloat16, torch.float16)
# Types of tensors without a way of their own, in a model and in a trace of it.
_PLAIN = (torch.Tensor, nn.Parameter)
_TRACED = (FakeTensor,)


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


torch.library.define("hf_kvret::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("hf_kvret::linear", "CPU", linear)


@torch.library.register_fake("hf_kvret::linear")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def speed_up_graph(graph: torch.fx.GraphModule) -> None:
    """Have products in a graph of ``torch.compile``, as dynamo traced it, go through ``linear``."""
    for node in graph.graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        args = (*node.args, None)[:3]
        x, weight, bias = (one and one.meta["example_value"] for one in args)
        is_quicker = not node.kwargs and may_be_quicker(weight, _TRACED)
        if is_quicker and fits(x, weight, bias, _TRACED):
            node.target, node.args = torch.ops.hf_kvret.linear.default, args
    graph.recompile()


def may_be_quicker(weight: torch.Tensor, plain: tuple[type, ...] = _PLAIN) -> bool:
    """Whether ``linear`` is quicker than torch with few tokens and ``weight``, here."""
    is_whole = type(weight) in plain and weight.is_cpu and weight.is_contiguous()
    is_quicker = is_whole and most_tokens(weight.dtype) > 0
    return is_quicker and preferred() is None and not host_library.why_not()


def fits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plain: tuple[type, ...] = _PLAIN,
) -> bool:
    """Whether ``linear`` takes these, of which ``weight`` was one that ``may_be_quicker``."""
    given = (x, weight) if bias is None else (x, weight, bias)
    alike = all(type(one) in plain and one.is_cpu and one.dtype == x.dtype for one in given)
    if not alike or weight.ndim != 2:
        return False
    outputs, depth = weight.shape
    whole = weight.is_contiguous() and (bias is None or bias.shape == (outputs,))
    return whole and x.shape[-1:] == (depth,) and 0 < x.numel() <= most_tokens(x.dtype) * depth


@functools.cache
def most_tokens(dtype: torch.dtype) -> int:
    """With how many tokens ``linear`` is quicker than torch here; 0: with none, or not measured."""
    cpu = torch.cpu
    if dtype not in _HALVES or not cpu._is_avx2_supported():
        return 0
    if dtype == torch.bfloat16:
        return _FEW if cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported() else _MOST
    # Processors with AMX multiply fp16, too.
    return 0 if cpu._is_amx_tile_supported() else _MOST
