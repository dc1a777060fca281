"""Linear modules in passes with a retrieval cache."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret.generate import fast_linear
from hf_kvret.models import products
from hf_kvret.testing import MODELS
from hf_kvret_kernels import host_library

pytestmark = pytest.mark.skipif(bool(host_library.why_not()), reason="no compiled library")

IDS = torch.arange(9, dtype=torch.long)[None]


@pytest.fixture
def calls(watch: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes to the library, on a processor without bf16 of its own."""
    monkeypatch.setattr(products, "most_tokens", lambda dtype: 64 * (dtype != torch.float32))
    return watch(fast_linear, "linear", lambda x, *_: tuple(x.shape))


def attached(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = MODELS["llama"].build().to(dtype)
    hf_kvret.attach(model)
    return model


def count(model: nn.Module) -> int:
    return sum(isinstance(module, nn.Linear) for module in model.modules())


def run(model: PreTrainedModel, ids: torch.Tensor = IDS, cache: Any = None) -> torch.Tensor:
    cache = hf_kvret.FlatKVCache(model.config) if cache is None else cache
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def test_a_pass_with_a_retrieval_cache_multiplies_in_the_library(calls: list[Any]) -> None:
    model = attached()
    got = run(model)
    assert len(calls) == count(model)
    hf_kvret.restore(model)
    torch.testing.assert_close(got, model(IDS).logits, rtol=0.05, atol=0.3)
    assert len(calls) == count(model)


def test_other_passes_go_on_with_torch(calls: list[Any]) -> None:
    model = attached()
    run(model, cache=DynamicCache())
    run(model, torch.zeros(1, 65, dtype=torch.long))
    run(attached(torch.float32))
    with pytest.raises(IndexError):
        run(model, IDS + 10**6)
    run(model, cache=DynamicCache())
    assert not calls


def test_ctrl_c_leaves_no_pass_behind(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model.model.norm, "forward", interrupt)
        run(model)
    calls.clear()
    run(model, cache=DynamicCache())
    assert not calls


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["hook", "global hook", "forward", "mode", "autocast"])
def test_who_looks_at_a_module_sees_torch_multiply(calls: list[Any], what: str) -> None:
    model, seen = attached(), []

    def see(*_: Any) -> None:
        seen.append(1)

    with contextlib.ExitStack() as stack:
        if what == "hook":
            model.lm_head.register_forward_hook(see)
        elif what == "global hook":
            hook = nn.modules.module.register_module_forward_hook(see)
            stack.callback(hook.remove)
        elif what == "forward":
            model.lm_head.forward = lambda x: (see(), nn.Linear.forward(model.lm_head, x))[1]
        elif what == "mode":
            stack.enter_context(FlopCounterMode(display=False))
        else:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        run(model)
    alone = what in ("hook", "forward")
    assert len(calls) == (count(model) - 1 if alone else 0)
    assert bool(seen) == (what in ("hook", "global hook", "forward"))


def other_weight(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data.T.contiguous().T)


def other_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(model.lm_head.out_features))


def fewer_inputs(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data[:, :-2].contiguous())


@pytest.mark.parametrize("change", [other_weight, other_bias, fewer_inputs])
def test_what_changed_since_goes_to_torch(calls: list[Any], change: Callable[[Any], None]) -> None:
    model = attached()
    expected = run(model)
    change(model)
    calls.clear()
    if change is other_weight:
        torch.testing.assert_close(run(model), expected, rtol=0.05, atol=0.3)
    else:
        with pytest.raises(RuntimeError):
            run(model)
    assert len(calls) == count(model) - 1


def test_a_copy_runs_alone(calls: list[Any]) -> None:
    model = attached()
    twin: Any = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    torch.testing.assert_close(run(twin), 2 * run(model), rtol=0.05, atol=0.6)
    hf_kvret.attach(twin)
    calls.clear()
    torch.testing.assert_close(run(twin), 2 * run(model), rtol=0, atol=0)
    assert len(calls) == 2 * count(twin)
