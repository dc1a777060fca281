"""Layers that keep a sliding window beside retrieval layers: their steps are replayed too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import DecodeGraph, FlatKVCache
from hf_kvret.testing import MODELS
from hf_kvret.testing.tape import taped

from .steps import OPTIONS

PROMPT = 26
NAMES = ["gemma3", *[pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gpt_oss")]]


def _model(name: str) -> Any:
    model = MODELS[name].build().eval()
    hf_kvret.attach(model)
    assert any(layer.is_sliding for layer in FlatKVCache(model.config).layers)
    return model


@torch.no_grad()
def _decode(
    model: PreTrainedModel,
    graphed: bool,
    steps: int,
    between: Any = None,
    padded: bool = False,
    prompt: int = PROMPT,
) -> tuple[torch.Tensor, Any]:
    cache = FlatKVCache(model.config, **OPTIONS)
    call: Any = DecodeGraph(model, cache) if graphed else model
    tokens = torch.arange(2 * prompt).view(2, prompt) * 7 % 50 + 10
    mask = torch.ones_like(tokens)
    mask[1, : 3 * padded] = 0
    logits = []
    for number in range(steps + 1):
        given: dict[str, Any] = {"attention_mask": mask} if padded else {}
        places = mask.cumsum(1)[:, -tokens.shape[1] :] - 1
        output = call(input_ids=tokens, position_ids=places, past_key_values=cache, **given)
        logits.append(output.logits[:, -1])
        tokens = logits[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        if between is not None and number == steps // 2:
            between(cache)
    return torch.stack(logits), call


@pytest.mark.parametrize("name", NAMES)
def test_full_windows_are_replayed_bit_for_bit(name: str) -> None:
    model = _model(name)
    with taped():
        expected, _ = _decode(model, False, 7)
        given, step = _decode(model, True, 7)
    assert torch.equal(given, expected)
    assert step.reason is None
    assert step.captures >= 2
    assert step.replays >= 3


@pytest.mark.slow
def test_a_window_that_is_not_full_yet_runs_as_usual_until_it_is() -> None:
    model = _model("gemma3")
    window = next(x for x in FlatKVCache(model.config).layers if x.is_sliding).sliding_window
    with taped():
        expected, _ = _decode(model, False, window, prompt=4)
        given, step = _decode(model, True, window, prompt=4)
    assert torch.equal(given, expected)
    assert step.reason is None
    assert step.eager >= window - 5
    assert step.replays >= 1


@pytest.mark.slow
def test_reordered_rows_in_between_are_noticed() -> None:
    model = _model("gemma3")

    def reorder(cache: Any) -> None:
        cache.reorder_cache(torch.tensor([1, 0]))

    with taped():
        expected, _ = _decode(model, False, 8, between=reorder)
        given, step = _decode(model, True, 8, between=reorder)
    assert torch.equal(given, expected)
    assert step.captures >= 2


@pytest.mark.slow
def test_a_fork_goes_its_own_way() -> None:
    model, twins = _model("gemma3"), []
    with taped():
        for graphed in (False, True):
            _decode(model, graphed, 8, between=lambda cache: twins.append(cache.fork()))
    for ours, theirs in zip(twins[1].layers, twins[0].layers, strict=True):
        if ours.is_sliding:
            assert torch.equal(ours.keys, theirs.keys)
            assert ours.cumulative_length == theirs.cumulative_length


def test_padding_is_not_told_to_them_so_steps_run_as_usual() -> None:
    model = _model("gemma3")
    with taped():
        expected, _ = _decode(model, False, 3, padded=True)
        given, step = _decode(model, True, 3, padded=True)
    assert torch.equal(given, expected)
    assert step.replays == 0
    assert "padded" in str(step.reason)


@pytest.mark.slow
def test_a_capture_that_fails_leaves_them_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("gemma3")
    with taped():
        expected, _ = _decode(model, False, 4)
        norm = model.model.norm.forward
        calls = []

        def waiting(x: torch.Tensor) -> torch.Tensor:
            calls.append(float(x.sum()))
            result: torch.Tensor = norm(x)
            return result

        monkeypatch.setattr(model.model.norm, "forward", waiting)
        given, step = _decode(model, True, 4)
    assert torch.equal(given, expected)
    assert step.replays == 0
    assert "could not be captured" in str(step.reason)
