"""Products of few tokens and weights of 16 bits, where the compiled library is quicker than torch.

With one token torch reads such a weight at a third to a half of the memory's rate, also where the
processor multiplies bf16. Without instructions for it, torch multiplies some dozens of tokens at a
tenth of the rate of fp32. The compiled library reads a weight once, converts it in the processor's
cache, and sums in fp32.

And the matrix of a projection that is linear, whatever stands in its place. An ``nn.Linear`` that
nobody changed is its weight and its bias. Anything else (a subclass, an adapter, a parametrization,
quantized, offloaded or distributed weights, hooks) is multiplied with the identity, at each call
because nobody knows what has changed since.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as module_of_torch

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
    # Nobody measured processors with AMX, where torch multiplies both dtypes, or others than x86.
    if cpu._is_amx_tile_supported() or not cpu._is_avx2_supported() or dtype not in _HALVES:
        return 0
    return _FEW if dtype == torch.bfloat16 and cpu._is_avx512_bf16_supported() else _MOST


@dataclass(frozen=True, eq=False)
class Affine:
    """A projection ``x -> matrix x + offset``.

    Attributes:
        matrix: ``[out, in]``.
        offset: ``[out]``, or None where there is none.
    """

    matrix: torch.Tensor
    offset: torch.Tensor | None


def affine(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """What ``projection`` does to vectors of ``inputs`` elements, of dtype and device of ``like``.

    The matrix of a plain linear layer is its weight itself. The projection must be linear.
    """
    if type(projection) is nn.Linear and "forward" not in projection.__dict__:
        weight, bias = projection.weight, projection.bias
        if {type(weight), type(bias)} <= {nn.Parameter, type(None)} and not is_hooked(projection):
            return Affine(weight, bias)
    return _images(projection, like, inputs)


def _images(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """The images of the identity's rows, and of zero, which a bias moves."""
    images = projection(torch.eye(inputs + 1, inputs, dtype=like.dtype, device=like.device))
    offset = images[inputs]
    # The difference of two numbers in bf16 has more digits than they have.
    wide = torch.promote_types(images.dtype, torch.float32)
    matrix = images[:inputs].to(wide) - offset.to(wide)
    return Affine(matrix.T.to(images.dtype).contiguous(), offset)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook runs around the module: one of its own, or one of all modules."""
    hooks = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module_of_torch._global_forward_hooks, module_of_torch._global_forward_pre_hooks),
    )
    return any(hooks)
