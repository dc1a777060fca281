"""Other weights than those that filled a cache are seen wherever they lie, and in any pass."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_kvret
from hf_kvret import RetrievalCache
from hf_kvret.testing import MODELS
from hf_kvret.testing.scenario import prompt

from .filled_caches import RUN, as_it_is, filled, forked, saved

OTHER = "filled by other weights"


def changed(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    return other


def embeddings(model: Any, count: int) -> dict[str, Any]:
    return {"inputs_embeds": model.get_input_embeddings()(prompt(1, count))}


@pytest.mark.parametrize(
    ("go_on", "inputs"),
    [
        (as_it_is, lambda model: {"input_ids": prompt(1, 1)}),
        (forked, lambda model: embeddings(model, 5)),
        (saved, lambda model: embeddings(model, 1)),
    ],
)
def test_the_first_pass_of_another_model_is_refused(
    llama: Any, tmp_path: Path, go_on: Callable[..., RetrievalCache], inputs: Callable[..., Any]
) -> None:
    cache, _ = filled(llama)
    cache = go_on(cache, tmp_path, llama)
    other = changed(llama)
    for model in (llama, other):
        hf_kvret.attach(model)
    with torch.no_grad():
        # The model that filled it goes on, and does not stand for others.
        llama(**inputs(llama), past_key_values=cache.fork())
        for module in (other, other.model):
            with pytest.raises(ValueError, match=OTHER):
                module(**inputs(other), past_key_values=cache)
        llama(**inputs(llama), past_key_values=cache)


def test_a_step_with_the_same_model_compares_nothing(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_kvret.attach(llama)
    cache, ids = filled(llama)
    with torch.no_grad():
        llama(ids[:, 53:60], past_key_values=cache)
        monkeypatch.setattr(RetrievalCache, "check_model", pytest.fail)
        for one in (cache, cache.fork(), copy.deepcopy(cache)):
            llama(ids[:, 60:61], past_key_values=one)
            llama.model(ids[:, 61:62], past_key_values=one)


def test_weights_written_past_autograd_are_seen_by_generate(llama: Any) -> None:
    """As PEFT merges adapters: ``parameter.data`` has no version counter."""
    cache, ids = filled(llama)
    llama.generate(ids, past_key_values=cache.fork(), **RUN)
    for parameter in llama.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    with pytest.raises(ValueError, match=OTHER):
        llama.generate(ids, past_key_values=cache, **RUN)


class Packed(nn.Module):
    """A linear layer of 8-bit codes in a buffer, as GPTQ and AWQ have them.

    Its first pass turns them over, as 4-bit modules of bitsandbytes lay theirs out on a CPU.
    """

    codes: torch.Tensor
    support_avx512bf16_for_cpu = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.state = SimpleNamespace(packing_format_for_cpu=False)
        self.weight = SimpleNamespace(is_cpu=True, quant_state=self.state)
        self.in_features, weight = linear.in_features, linear.weight.detach()
        self.scale = float(weight.abs().amax() / 127)
        self.register_buffer("codes", (weight / self.scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.state.packing_format_for_cpu:
            self.codes, self.state.packing_format_for_cpu = self.codes.flip(0), True
        return x @ (self.codes.flip(0).float() * self.scale).T


def quantized(model: Any, noise: float = 0.0) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            with torch.no_grad():
                linear.weight += noise * torch.randn_like(linear.weight)
            setattr(layer.self_attn, name, Packed(linear))
    return model


def test_other_quantized_weights_are_refused(
    llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = quantized(llama), quantized(llama, noise=0.1)
    cache, ids = filled(one)
    cache = saved(cache, tmp_path, one)
    with pytest.raises(ValueError, match=OTHER):
        other.generate(ids, past_key_values=cache.fork(), **RUN)
    again = quantized(llama)
    for same in (one, again):
        same.generate(ids, past_key_values=cache.fork(), **RUN)
    assert not caplog.text
    # Also where the codes of the same object are written anew.
    for layer in again.model.layers:
        layer.self_attn.v_proj.codes += 1
    with pytest.raises(ValueError, match=OTHER):
        again.generate(ids, past_key_values=cache, **RUN)


def test_another_vision_tower_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = MODELS["qwen2_vl"].build()
    cache, ids = filled(model)
    other, twin = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.model.visual.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        twin.lm_head.weight.mul_(2)
    # A text model in between leaves the tower that filled it.
    cache.check_model(copy.deepcopy(model.model.language_model))
    caplog.clear()
    for one in (cache, saved(cache, tmp_path, model)):
        with pytest.raises(ValueError, match=OTHER):
            other.generate(ids, past_key_values=one, **RUN)
        twin.generate(ids, past_key_values=one, **RUN)
    assert not caplog.text


def test_many_small_changes_are_compared_with_what_filled_it(llama: Any) -> None:
    cache, _ = filled(llama)
    llama.requires_grad_(False)
    with pytest.raises(ValueError, match=OTHER):
        for _ in range(20):
            for parameter in llama.parameters():
                parameter.mul_(1.005)
            cache.check_model(llama)


def test_the_dtype_is_that_of_the_text_model(tmp_path: Path) -> None:
    model = MODELS["qwen2_vl"].build()
    model.model.language_model.to(torch.bfloat16)
    model.lm_head.to(torch.bfloat16)
    cache, ids = filled(model)
    loaded = saved(cache, tmp_path, model)
    model.generate(ids, past_key_values=loaded, **RUN)
    assert loaded.identity is not None and loaded.identity.facts["dtype"] == "bfloat16"
