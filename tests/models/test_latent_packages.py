"""Latent attention with what others make of ``kv_b_proj``: their packages, where installed.

Changes between steps are shown of stand-ins in ``test_latent_projections.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret import FlatKVCache, LatentKVCache
from hf_kvret.testing import COVERING_OPTIONS, LOGIT_TOLERANCE
from hf_kvret.testing.scenario import prompt

from .latent_projections import logits, projections

# Importing any of them takes seconds.
pytestmark = pytest.mark.slow
GREEDY = {"max_new_tokens": 6, "do_sample": False}
CACHES: list[Callable[[Any], Cache]] = [
    lambda config: FlatKVCache(config, **COVERING_OPTIONS),
    lambda config: LatentKVCache(config),
]


@pytest.fixture
def lora(model: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = {"target_modules": ["kv_b_proj"], "init_lora_weights": False, "lora_dropout": 0.1}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, **options))
    adapted.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=16, **options))
    adapted.add_adapter("offset", peft.LoraConfig(r=2, lora_bias=True, **options))
    return adapted.eval()


@pytest.mark.parametrize("state", ["default", "other", "offset", "dora", "merged", "off"])
def test_lora_generates_the_same(state: str, lora: Any, model: PreTrainedModel) -> None:
    plain = model.generate(prompt(1, 120), **GREEDY)
    if state == "dora":
        peft = pytest.importorskip("peft")
        options = {"target_modules": ["kv_b_proj"], "init_lora_weights": False}
        lora.add_adapter("dora", peft.LoraConfig(r=2, use_dora=True, **options))
        lora.eval()
    if state in lora.peft_config:
        lora.set_adapter(state)
    elif state == "merged":
        lora.merge_adapter()
    with lora.disable_adapter() if state == "off" else torch.no_grad():
        expected = lora.generate(input_ids=prompt(1, 120), **GREEDY)
        for make in CACHES:
            cache = make(model.config)
            answer = lora.generate(input_ids=prompt(1, 120), past_key_values=cache, **GREEDY)
            assert torch.equal(answer, expected)
    # Without the adapter that is active at first the text is another.
    assert torch.equal(plain, expected) is (state in ("default", "merged"))


@pytest.mark.parametrize("kind", ["torchao weights", "torchao both", "bitsandbytes"])
def test_quantized_weights_give_what_stock_gives(kind: str, model: PreTrainedModel) -> None:
    plain = logits(model, DynamicCache(config=model.config), {})
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = quantized(kind, layer.self_attn.kv_b_proj)
    expected = logits(model, DynamicCache(config=model.config), {})
    error = (expected - plain).abs().max().item()
    assert error > 10 * LOGIT_TOLERANCE
    # Where latents are rounded, too, the matrix alone has no part in that: both are about as far
    # from the plain model, in directions of their own.
    allowed = 2 * error if kind == "torchao both" else LOGIT_TOLERANCE
    for make in CACHES:
        found = logits(model, make(model.config), {})
        assert (found - expected).abs().max() < allowed
        assert (found - plain).abs().max() > 0.2 * error, "the matrix is read as it is rounded"


def quantized(kind: str, linear: nn.Linear) -> nn.Module:
    if kind == "bitsandbytes":
        bnb = pytest.importorskip("bitsandbytes")
        four = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32
        )
        four.load_state_dict(linear.state_dict())
        return four.to("cpu")
    library = pytest.importorskip("torchao.quantization")
    name = {"torchao weights": "Int8WeightOnlyConfig"}.get(
        kind, "Int8DynamicActivationInt8WeightConfig"
    )
    box = nn.Sequential(linear)
    library.quantize_(box, getattr(library, name)())
    return box[0]


def test_offloaded_weights(model: PreTrainedModel) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = model.generate(prompt(1, 120), **GREEDY)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(one.weight.is_meta for one in projections(model))
    for make in CACHES:
        cache = make(model.config)
        assert torch.equal(
            model.generate(prompt(1, 120), past_key_values=cache, **GREEDY), expected
        )
