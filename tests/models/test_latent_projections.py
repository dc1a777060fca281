"""Latent attention with what stands in place of ``kv_b_proj``: its matrix is the current one."""

import copy
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
from transformers.cache_utils import Cache

import hf_kvret
from hf_kvret import FlatKVCache, LatentKVCache
from hf_kvret.models import products
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt

STEPS = 4
Change = Callable[[PreTrainedModel], object]


@pytest.fixture
def model() -> PreTrainedModel:
    """Attached, so that ``model(...)`` takes any cache."""
    built = LATENT_MODELS["deepseek_v3"].build()
    hf_kvret.attach(built)
    return built


@pytest.fixture
def calls(watch: Any) -> list[nn.Module]:
    """The projections that are asked for their matrix, in order."""
    return watch(products, "_images", lambda module, *_: module)


def replaced(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = make(layer.self_attn.kv_b_proj)
    return model.eval()


def projections(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache, changes: dict[int, Change]) -> torch.Tensor:
    """``[STEPS + 1, V]`` after a prompt and after each of the same tokens, ``changes`` between."""
    ids, rows = prompt(1, 40 + STEPS), []
    rows.append(model(ids[:, :40], past_key_values=cache).logits[0, -1])
    for step in range(STEPS):
        changes.get(step, lambda model: None)(model)
        rows.append(model(ids[:, 40 + step, None], past_key_values=cache).logits[0, -1])
    return torch.stack(rows)


def check(model: PreTrainedModel, changes: dict[int, Change] | None = None) -> None:
    """As transformers' own cache, for a method that selects and for one that reads all."""
    changes, config = changes or {}, model.config
    expected = logits(copy.deepcopy(model), DynamicCache(config=config), changes)
    for cache in (FlatKVCache(config, **COVERING_OPTIONS), LatentKVCache(config)):
        result = logits(copy.deepcopy(model), cache, changes)
        torch.testing.assert_close(result, expected, rtol=0, atol=LOGIT_TOLERANCE)


def in_all(change: Callable[[Any], object]) -> Change:
    def changed(model: PreTrainedModel) -> None:
        for one in projections(model):
            change(one)

    return changed


def with_bias(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    return linear


def test_an_offset_goes_to_values(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    check(replaced(model, with_bias))
    # A linear layer with a bias is read as it is.
    assert not calls


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


def test_an_offloaded_weight_is_read_anew(model: PreTrainedModel, calls: list[nn.Module]) -> None:
    check(replaced(model, Offloaded), {2: in_all(lambda module: module.on_host.mul_(2))})
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


class Adapter(nn.Module):
    """As PEFT's: low-rank parts beside the layer that it wraps, of which some are active."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base, self.active, self.scaling = base, ["a"], {"a": 0.5, "b": 1.5}
        self.dropout = nn.Dropout(0.5)
        for name, shape in {"down": (4, 16), "up": (base.out_features, 4)}.items():
            for part in self.scaling:
                weight = torch.randn(shape, generator=generator) / 4
                setattr(self, f"{name}_{part}", nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        for part in self.active:
            low = self.dropout(x) @ getattr(self, f"down_{part}").T
            out = out + self.scaling[part] * low @ getattr(self, f"up_{part}").T
        return out


@pytest.fixture
def adapted(model: PreTrainedModel) -> PreTrainedModel:
    """With an adapter in place of each projection."""
    return replaced(model, Adapter)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: 1.5 * out)


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda module: module.base.weight.data.mul_(2),
    "hook": hook,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_seen(
    change: str, adapted: PreTrainedModel, calls: list[nn.Module]
) -> None:
    expected = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), {})
    changes = {2: in_all(CHANGES[change])}
    other = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), changes)
    assert torch.equal(expected[:3], other[:3]) and (other[3:] - expected[3:]).abs().max() > 0.05
    assert not calls
    check(adapted, changes)
    # Two caches and two layers.
    assert len(calls) == 4 * STEPS


@torch.no_grad()
def test_hooks_of_all_modules_count(model: PreTrainedModel) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if type(module) is nn.Linear else None
    )
    try:
        matrix = products.affine(projections(model)[0], torch.zeros(1), 16).matrix
    finally:
        handle.remove()
    torch.testing.assert_close(
        matrix, 2 * products.affine(projections(model)[0], torch.zeros(1), 16).matrix
    )
