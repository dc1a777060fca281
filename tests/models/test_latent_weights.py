"""Latent attention where ``kv_b_proj`` changes: its matrix is always the current one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvret import LatentKVCache
from hf_kvret.models import projection

from .latent_projections import (
    STEPS,
    check,
    in_all,
    logits,
    projections,
    replaced,
)


class Adapter(nn.Module):
    """As PEFT's: low-rank parts beside the layer that it wraps, of which some are active."""

    def __init__(self, base: nn.Module, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
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


def optimize(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.05).step()
    module.zero_grad()


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: 1.5 * out)


def other_forward(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda x: 0.5 * plain(x)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": lambda module: module.base.weight.data.mul_(2),
    "signs": lambda module: module.up_a.data.neg_(),
    "one number": lambda module: module.base.weight.data[3, 5].add_(1.0),
    "optimizer": optimize,
    "other parameter": lambda module: setattr(module, "up_a", nn.Parameter(module.up_b.data * 2)),
    "loaded": lambda module: module.load_state_dict(Adapter(module.base, seed=1).state_dict()),
    "scaling": lambda module: module.scaling.update(a=2.0),
    "active": lambda module: setattr(module, "active", ["b", "a"]),
    "off": lambda module: module.active.clear(),
    "child": lambda module: setattr(module, "base", nn.Linear(16, module.base.out_features, False)),
    "hook": hook,
    "hook of a child": lambda module: hook(module.base),
    "forward": other_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_seen(
    change: str, adapted: PreTrainedModel, calls: list[nn.Module]
) -> None:
    def seeded(module: Any) -> None:
        torch.manual_seed(0)
        CHANGES[change](module)

    expected = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), {})
    changes = {3: in_all(seeded)}
    other = logits(copy.deepcopy(adapted), DynamicCache(config=adapted.config), changes)
    assert torch.equal(expected[:4], other[:4]) and (other[4:] - expected[4:]).abs().max() > 0.05
    assert not calls
    check(adapted, changes)
    # Two caches and two layers.
    assert len(calls) == 4 * STEPS


def test_a_change_and_back_is_seen_twice(adapted: PreTrainedModel) -> None:
    off = in_all(lambda module: setattr(module, "active", []))
    on = in_all(lambda module: setattr(module, "active", ["a"]))
    check(adapted, {1: off, 3: on, 4: off})


def affine(module: nn.Module, dtype: torch.dtype = torch.float32) -> projection.Affine:
    return projection.affine(module, torch.zeros(1, dtype=dtype), 16)


@torch.no_grad()
def test_modes_of_torch_count(adapted: PreTrainedModel) -> None:
    module = projections(adapted)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert affine(module).matrix.dtype == torch.bfloat16
    with torch.inference_mode():
        assert affine(module).matrix.is_inference()
    with torch.enable_grad():
        assert affine(module).matrix.requires_grad
    module.double()
    assert affine(module, torch.float64).matrix.dtype == torch.float64


@torch.no_grad()
def test_hooks_of_all_modules_count(model: PreTrainedModel) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if type(module) is nn.Linear else None
    )
    try:
        matrix = affine(projections(model)[0]).matrix
    finally:
        handle.remove()
    torch.testing.assert_close(matrix, 2 * affine(projections(model)[0]).matrix)


def test_threads_with_models_of_their_own_and_one_in_common(adapted: PreTrainedModel) -> None:
    expected = logits(adapted, LatentKVCache(adapted.config), {})
    results: list[torch.Tensor] = []

    def run() -> None:
        for own in (adapted, copy.deepcopy(adapted)):
            results.append(logits(own, LatentKVCache(own.config), {}))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(one, expected) for one in results)
