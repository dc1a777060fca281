"""Which model an artifact belongs to: every fact that matters is told, none that doesn't."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig, PreTrainedModel

from hf_kvret.artifacts import ModelIdentity
from hf_kvret.saved.identity import model_facts
from hf_kvret.testing import MODELS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "2 layers, this model has 3"),
        ({"hidden_size": 128}, "64 numbers in a hidden state, this model has 128"),
        ({"num_attention_heads": 8}, "4 query heads, this model has 8"),
        ({"num_key_value_heads": 1}, "2 KV heads, this model has 1"),
        ({"head_dim": 32}, "16 numbers in a head, this model has 32"),
        ({"vocab_size": 129}, "128 words in its vocabulary, this model has 129"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types=none, this model has ['sliding_attention', 'full_attention']",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=none, this model has [1, 0]"),
        ({"rope": {"rope_theta": 5e5}}, "rope.rope_theta=10000.0, this model has 500000.0"),
        ({"rope": {"factor": 4.0}}, "rope.factor=8.0, this model has 4.0"),
        ({"rope": {"rope_type": "yarn"}}, "rope.rope_type=llama3, this model has yarn"),
        (
            {"rope": {"partial_rotary_factor": 0.5}},
            "rope.partial_rotary_factor=none, this model has 0.5",
        ),
        ({"rope": {"low_freq_factor": None}}, "rope.low_freq_factor=1.0, this model has none"),
        ({"rope": {"short_factor": [1, 2]}}, "rope.short_factor=none, this model has [1.0, 2.0]"),
        ({"use_cache": False}, ""),
        ({"dtype": "bfloat16"}, ""),
        ({"attention_dropout": 0.1}, ""),
        ({"eos_token_id": 5}, ""),
        ({"max_position_embeddings": 4096}, ""),
        ({"_attn_implementation": "eager"}, ""),
        # Other words for the same.
        ({"layer_types": ["full_attention", "full_attention"]}, ""),
        ({"rope": {"rope_theta": 10_000, "type": "llama3", "attention_factor": None}}, ""),
        ({"rope": {"partial_rotary_factor": 1.0}}, ""),
    ],
    ids=str,
)
def test_the_first_difference_that_matters_is_named(
    llama: PreTrainedModel, identity: ModelIdentity, changes: dict[str, Any], words: str
) -> None:
    config = copy.deepcopy(llama.config)
    rope = changes.get("rope", {})
    config.rope_parameters = {**config.rope_parameters, **rope}
    for name, value in changes.items():
        if name != "rope":
            setattr(config, name, value)
    assert identity.difference(config) == (f"made for {words}" if words else "")
    is_same = ModelIdentity("other name", model_facts(config)).sha256 == identity.sha256
    assert is_same == (not words)


def test_models_are_told_apart() -> None:
    identities = {
        name: ModelIdentity(name, model_facts(model.config())) for name, model in MODELS.items()
    }
    assert len({identity.sha256 for identity in identities.values()}) == len(MODELS)
    llama, gemma = identities["llama"], identities["gemma3"]
    assert llama.difference(MODELS["qwen2"].config()) == "made for a llama model, this one is qwen2"
    assert "rope.full_attention.rope_theta" in gemma.facts
    assert identities["gpt2"].facts["num_key_value_heads"] > 0
    assert not [name for name in identities["gpt2"].facts if name.startswith("rope")]
    config = MODELS["gemma3"].config()
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    words = "made for layer_types[2]=full_attention, this model has sliding_attention"
    assert gemma.difference(config) == words
    with pytest.raises(TypeError, match=r"config is a Linear: pass model\.config"):
        llama.difference(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_text_model_inside_another_is_the_same_model() -> None:
    text = Gemma3TextConfig(num_hidden_layers=2)
    whole = Gemma3Config(text_config=text.to_dict())
    assert model_facts(whole) == model_facts(text)


def test_facts_are_plain_json_and_come_back(identity: ModelIdentity) -> None:
    assert ModelIdentity.from_json(json.loads(json.dumps(identity.as_json()))) == identity
    for model in MODELS.values():
        facts = model_facts(model.config())
        assert json.loads(json.dumps(facts)) == facts


def test_only_the_name_of_a_local_folder_is_kept(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-llama").mkdir()
    assert ModelIdentity.of(llama, str(tmp_path / "my-llama")).name == "my-llama"
    monkeypatch.setattr(llama.config, "_name_or_path", "meta/llama")
    assert ModelIdentity.of(llama).name == "meta/llama"
    monkeypatch.setattr(llama.config, "_name_or_path", "")
    assert ModelIdentity.of(llama).name == "llama"
