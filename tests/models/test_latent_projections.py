"""Latent attention where ``kv_b_proj`` is no plain weight, and where it can't be one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import DynamicCache, PreTrainedModel

from hf_kvret import LatentKVCache
from hf_kvret.models import projection
from hf_kvret.testing import LOGIT_TOLERANCE

from .latent_projections import (
    STEPS,
    check,
    in_all,
    logits,
    projections,
    replaced,
)


def with_bias(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    return linear


def test_an_offset_goes_to_values(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    check(replaced(model, with_bias))
    # A linear layer with a bias is read as it is.
    assert not calls


class Subclass(nn.Linear):
    """Of a user's own."""


def subclass(linear: nn.Linear) -> nn.Module:
    twin = Subclass(linear.in_features, linear.out_features)
    twin.load_state_dict(linear.state_dict())
    return twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", [nn.Sequential, subclass, lambda linear: linear])
@torch.no_grad()
def test_a_bias_takes_no_precision_of_the_matrix(
    wrap: Callable[[Any], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 128)
    linear.weight.mul_(0.5)
    # Tens of times as large as the weights.
    linear.bias.normal_(0, 2)
    module = wrap(linear).to(dtype).eval()
    weight, bias = linear.weight.to(dtype).float(), linear.bias.to(dtype)
    result = projection.affine(module, torch.zeros(1, dtype=dtype), 64)
    assert result.matrix.dtype == dtype and torch.equal(result.offset, bias)
    # The last digit of the weight, and of the bias in the last of a sum 64 times as large.
    allowed = torch.finfo(dtype).eps * (weight.abs() + bias.float().abs()[:, None] / 64)
    assert ((result.matrix.float() - weight).abs() <= allowed).all()
    assert torch.equal(result.matrix.float(), weight) is (module is linear)


class FixedRange(nn.Module):
    """As a layer whose inputs are quantized in a range that calibration has fixed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-10, 10) @ (self.codes.to(x.dtype) * self.scale).T


@torch.no_grad()
def test_quantized_inputs_stay_in_their_range() -> None:
    linear = nn.Linear(64, 128, bias=False)
    module = FixedRange(linear).eval()
    matrix = projection.affine(module, torch.zeros(1), 64).matrix
    torch.testing.assert_close(matrix, module.codes.float() * module.scale)


class Offloaded(nn.Module):
    """As accelerate's: the weight is there during a call only, between calls it is on meta."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.on_host = linear, linear.weight.data
        linear.weight = nn.Parameter(linear.weight.to("meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        away, self.linear.weight = self.linear.weight, nn.Parameter(self.on_host.to(x.device))
        out = self.linear(x)
        self.linear.weight = away
        return out


def test_an_offloaded_weight_comes_for_each_call(
    model: PreTrainedModel, calls: list[nn.Module]
) -> None:
    check(replaced(model, Offloaded), {3: in_all(lambda module: module.on_host.mul_(2))})
    assert len(calls) == 4 * STEPS


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_weight_in_eight_bits(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    plain = logits(model, DynamicCache(config=model.config), {})

    def quantized(linear: nn.Linear) -> nn.Module:
        box = nn.Sequential(linear)
        quantize = torch.ao.quantization.quantize_dynamic
        return quantize(box, {nn.Linear}, dtype=torch.qint8)[0]

    replaced(model, quantized)
    error = (logits(model, DynamicCache(config=model.config), {}) - plain).abs().max().item()
    assert error > 10 * LOGIT_TOLERANCE
    # Stock rounds latents to eight bits, too, in which the matrix alone has no part.
    check(model, tolerance=error)
    assert len(calls) == 4 * STEPS


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_distributed_weight_is_multiplied_anew(
    model: PreTrainedModel, mesh: Any, calls: list[nn.Module]
) -> None:
    expected = logits(model, DynamicCache(config=model.config), {})
    replaced(model, lambda linear: parallelize_module(linear, mesh, ColwiseParallel()))
    assert all(isinstance(one.weight, DTensor) for one in projections(model))
    result = logits(model, LatentKVCache(model.config), {})
    torch.testing.assert_close(result, expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert calls == projections(model) * STEPS
