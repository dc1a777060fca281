"""The attention that a model had: found, remembered, and never the wrong one."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvret
from hf_kvret import FlatKVCache
from hf_kvret.attention import attention, base as base_attention
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import ragged

from ..kernels.draws import attention64

FLASH = "flash_attention_2"
RUN = {"max_new_tokens": 10, "do_sample": False}
# Two fp32 orders of the same sums, through three layers with logits around 10.
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def _prompt() -> dict[str, torch.Tensor]:
    ids, mask = ragged((40, 29))
    return {"input_ids": ids, "attention_mask": mask}


def _logits(model: PreTrainedModel, cache: Any) -> torch.Tensor:
    """Of a padded prompt and three steps behind it."""
    inputs = _prompt()
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    with torch.no_grad():
        found = [model(**inputs, past_key_values=cache).logits[1:, -5:]]
        for _ in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
            out = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
            found.append(out.logits)
    return torch.cat([part.flatten(0, 1) for part in found])


class FlashStandIn:
    """Causal attention with flash attention's masks; notes the names in the modules' configs."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        self.names.append(module.config._attn_implementation)
        assert module.layer_idx in (0, 1) and not module.training and module.is_causal
        assert attention_mask is None or attention_mask.ndim == 2
        new, total = query.shape[2], key.shape[2]
        seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)[None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None].bool()
        rows = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        out = attention64(query, *rows, seen[:, None], scaling)[0].to(query.dtype)
        return out.transpose(1, 2), None


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashStandIn]:
    stand_in = FlashStandIn()
    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, FLASH, stand_in)
    yield stand_in


@pytest.mark.parametrize("padded", [False, True])
def test_flash_attention_is_called_under_its_own_name(flash: FlashStandIn, padded: bool) -> None:
    model = MODELS["llama"].build()
    inputs = _prompt() if padded else {"input_ids": _prompt()["input_ids"][:1]}
    expected = model.generate(**inputs, **RUN)
    model.config._attn_implementation = FLASH  # as if flash-attn were installed
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    assert torch.equal(model.generate(**inputs, **RUN, past_key_values=cache), expected)
    assert flash.names == [FLASH] * 2, "the prompt of both layers, and nothing else"
    assert torch.equal(model.generate(**inputs, **RUN), expected)
    assert model.config._attn_implementation == "hf_kvret"
    assert len(flash.names) == 2 + 2 * 10 and set(flash.names) == {FLASH}
    hf_kvret.restore(model)
    assert model.config._attn_implementation == FLASH


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_the_models_attention_reads_the_prompt(
    base: str, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["llama"].build()
    model.set_attn_implementation(base)
    names = watch(attention, "attend_with_base", lambda name, *_, **__: name)
    monkeypatch.setattr(attention, "compiled", lambda query: False)
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    inputs = _prompt()
    expected = model.generate(**inputs, **RUN)
    assert torch.equal(model.generate(**inputs, **RUN, past_key_values=cache), expected)
    assert names == [base] * 2


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_a_model_loaded_with_our_name_matches_eager(name: str, tmp_path: Path) -> None:
    """Nobody recorded a base: soft cap and sinks must not be lost on the way."""
    model = MODELS[name].build()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="paris")
    assert loaded.config._attn_implementation == "paris"
    expected = _logits(model, DynamicCache(config=model.config))
    ours = FlatKVCache(loaded.config, **COVERING_OPTIONS)
    for cache in (DynamicCache(config=model.config), ours):
        torch.testing.assert_close(_logits(loaded, cache), expected, **CLOSE)


def test_without_a_record_sdpa_is_only_for_calls_it_can_honour() -> None:
    plain = MODELS["llama"].build().model.layers[0].self_attn
    sinks = MODELS["gpt_oss"].build().model.layers[0].self_attn
    assert base_attention.base_name(plain, {"softcap": None}) == "sdpa"
    assert base_attention.base_name(plain, {"softcap": 50.0}) == "eager"
    assert base_attention.base_name(plain, {"s_aux": torch.zeros(4)}) == "eager"
    assert base_attention.base_name(sinks, {}) == "eager", "the model has no sdpa"
    base_attention.record_base(plain.config, FLASH)
    assert base_attention.base_name(plain, {"softcap": 50.0}) == FLASH


def test_the_record_dies_with_its_config() -> None:
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    key = id(model.config)
    assert base_attention.recorded_base(model.config) == "sdpa"
    assert "sdpa" not in model.config.to_json_string()
    del model
    gc.collect()
    assert key not in base_attention._bases
