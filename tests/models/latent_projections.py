"""A small model with latent attention, whose ``kv_b_proj`` tests replace and compare with stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret import FlatKVCache, LatentKVCache
from hf_kvret.testing import COVERING_OPTIONS, LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt

STEPS = 6
Change = Callable[[PreTrainedModel], object]


def replaced(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = make(layer.self_attn.kv_b_proj)
    return model.eval()


def projections(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Cache, changes: dict[int, Change]) -> torch.Tensor:
    """``[STEPS + 1, V]`` after a prompt and after each of the same tokens, ``changes`` between."""
    ids, rows = prompt(1, 60 + STEPS), []
    rows.append(model(ids[:, :60], past_key_values=cache).logits[0, -1])
    for step in range(STEPS):
        changes.get(step, lambda model: None)(model)
        rows.append(model(ids[:, 60 + step, None], past_key_values=cache).logits[0, -1])
    return torch.stack(rows)


def check(
    model: PreTrainedModel, changes: dict[int, Change] | None = None, tolerance: float = 0.0
) -> None:
    """As transformers' own cache, for a method that selects and for one that reads all."""
    changes, stock = changes or {}, copy.deepcopy(model)
    expected = logits(stock, DynamicCache(config=stock.config), changes)
    for make in (lambda own: FlatKVCache(own.config, **COVERING_OPTIONS), _latent):
        own = copy.deepcopy(model)
        cache = make(own)
        result = logits(own, cache, changes)
        worst = (result - expected).abs().max().item()
        assert worst < LOGIT_TOLERANCE + tolerance, type(cache).__name__


def _latent(model: PreTrainedModel) -> Cache:
    return LatentKVCache(model.config)


def in_all(change: Callable[[Any], object]) -> Change:
    def changed(model: PreTrainedModel) -> None:
        for one in projections(model):
            change(one)

    return changed
