"""Linear modules in passes with a retrieval cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret.generate import fast_linear
from hf_kvret.models import products
from hf_kvret.testing import MODELS
from hf_kvret_kernels import host_library

pytestmark = pytest.mark.skipif(bool(host_library.why_not()), reason="no compiled library")

IDS = torch.arange(9, dtype=torch.long)[None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes to the library, on a processor without bf16 of its own."""
    shapes: list[tuple[int, ...]] = []

    def spy(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return products.linear(x, *rest)

    monkeypatch.setattr(products, "_has_bf16", lambda: False)
    monkeypatch.setattr(fast_linear, "linear", spy)
    return shapes


def attached(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = MODELS["llama"].build().to(dtype)
    hf_kvret.attach(model)
    return model


def count(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def run(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=hf_kvret.FlatKVCache(model.config)).logits


def test_a_pass_with_a_retrieval_cache_multiplies_in_the_library(calls: list[Any]) -> None:
    model = attached()
    got = run(model)
    assert len(calls) == count(model)
    hf_kvret.restore(model)
    plain = model(IDS).logits
    torch.testing.assert_close(got, plain, rtol=0.05, atol=0.3)
    assert len(calls) == count(model)


def test_other_passes_go_on_with_torch(calls: list[Any]) -> None:
    model = attached()
    with torch.no_grad():
        model(IDS, past_key_values=DynamicCache())
    run(model, torch.zeros(1, 65, dtype=torch.long))
    run(attached(torch.float32))
    with pytest.raises(IndexError), torch.no_grad():
        model(IDS + 10**6, past_key_values=hf_kvret.FlatKVCache(model.config))
    with torch.no_grad():
        model(IDS, past_key_values=DynamicCache())
    assert not calls


def test_hooks_of_a_module_are_called(calls: list[Any]) -> None:
    model, seen = attached(), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    run(model)
    assert seen == [1] and len(calls) == count(model) - 1


def test_a_copy_runs_alone(calls: list[Any]) -> None:
    model = attached()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(run(twin), run(model))
    hf_kvret.attach(twin)
    calls.clear()
    run(twin)
    assert len(calls) == count(twin)
