"""The text model in a model: in types that call something else their decoder, in wrappers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_model_patches.decoders import decoder_of

RUN: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def modernbert() -> PreTrainedModel:
    """Its ``get_decoder()`` is the linear layer that makes logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "modernbert-decoder", vocab_size=128, hidden_size=64, intermediate_size=96,
        num_hidden_layers=3, num_attention_heads=4, local_attention=64,
        layer_types=["full_attention"] * 3, max_position_embeddings=1024,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 1),
        eos_token_id=None,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    assert isinstance(model.get_decoder(), nn.Linear)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_vl", "gemma3"])
def test_it_is_what_get_decoder_gives_where_that_is_a_model(name: str) -> None:
    model = MODELS[name].build()
    decoder = decoder_of(model)
    assert decoder is model.get_decoder() and decoder is not model
    assert decoder_of(decoder) is decoder


def test_a_compiled_decoder_is_seen_through(model: Any) -> None:
    model.model = torch.compile(model.model, backend="eager")
    assert decoder_of(model) is model.model._orig_mod


def test_a_linear_layer_as_decoder_is_served(modernbert: PreTrainedModel, tmp_path: Path) -> None:
    ids = prompt(2, 200)
    expected = modernbert.generate(ids, **RUN)
    cache = FlatKVCache(modernbert.config, **COVERING_OPTIONS)
    assert torch.equal(modernbert.generate(ids, past_key_values=cache, **RUN), expected)
    assert cache.tokens and cache.identity is not None
    cache.save_pretrained(tmp_path)
    loaded = FlatKVCache.from_pretrained(tmp_path, modernbert.config, model=modernbert)
    second = torch.cat([expected, prompt(2, 9)], dim=1)
    answers = [modernbert.generate(second, past_key_values=one, **RUN) for one in (loaded, cache)]
    assert torch.equal(*answers)
    assert torch.equal(answers[0], modernbert.generate(second, **RUN))


def test_other_weights_of_such_a_model_are_refused(modernbert: PreTrainedModel) -> None:
    ids, cache = prompt(1, 100), ParisKVCache(modernbert.config, **COVERING_OPTIONS)
    tokens = modernbert.generate(ids, past_key_values=cache, **RUN)
    with torch.no_grad():
        for parameter in modernbert.model.parameters():
            parameter.mul_(1.5)
    with pytest.raises(ValueError, match="filled by other weights"):
        modernbert.generate(tokens, past_key_values=cache, **RUN)
