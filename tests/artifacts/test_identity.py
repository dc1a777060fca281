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

# An old name of the same thing, and what decides nothing about keys and queries.
HARMLESS: dict[str, Any] = {
    "use_cache": False,
    "dtype": "bfloat16",
    "attention_dropout": 0.1,
    "eos_token_id": 5,
    "max_position_embeddings": 4096,
    "_attn_implementation": "eager",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, "made for 2 layers, this model has 3"),
        ({"hidden_size": 128}, "made for 64 numbers in a hidden state, this model has 128"),
        ({"num_attention_heads": 8}, "made for 4 query heads, this model has 8"),
        ({"num_key_value_heads": 1}, "made for 2 KV heads, this model has 1"),
        ({"head_dim": 32}, "made for 16 numbers in a head, this model has 32"),
        ({"vocab_size": 129}, "made for 128 words in its vocabulary, this model has 129"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "made for layer_types=none, this model has ",
        ),
        ({"no_rope_layers": [1, 0]}, "made for no_rope_layers=none, this model has [1, 0]"),
    ],
)
def test_the_first_difference_is_named(
    llama: PreTrainedModel, identity: ModelIdentity, changes: dict[str, Any], words: str
) -> None:
    config = copy.deepcopy(llama.config)
    for name, value in changes.items():
        setattr(config, name, value)
    assert identity.difference(llama.config) == ""
    assert identity.difference(config).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5}, "rope.rope_theta=10000.0, this model has 500000.0"),
        ({"factor": 4.0}, "rope.factor=8.0, this model has 4.0"),
        ({"rope_type": "yarn"}, "rope.rope_type=llama3, this model has yarn"),
        ({"partial_rotary_factor": 0.5}, "rope.partial_rotary_factor=none, this model has 0.5"),
        ({"low_freq_factor": None}, "rope.low_freq_factor=1.0, this model has none"),
        ({"short_factor": [1, 2]}, "rope.short_factor=none, this model has [1.0, 2.0]"),
    ],
)
def test_rope_must_agree(
    llama: PreTrainedModel, identity: ModelIdentity, changes: dict[str, Any], words: str
) -> None:
    config = copy.deepcopy(llama.config)
    config.rope_parameters = {**config.rope_parameters, **changes}
    assert identity.difference(config) == f"made for {words}"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_decides_nothing_may_differ(
    llama: PreTrainedModel, identity: ModelIdentity, name: str
) -> None:
    config = copy.deepcopy(llama.config)
    setattr(config, name, HARMLESS[name])
    assert identity.difference(config) == ""


def test_ways_to_write_the_same_are_the_same(
    llama: PreTrainedModel, identity: ModelIdentity
) -> None:
    config = copy.deepcopy(llama.config)
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_theta": 10_000,
        "type": "llama3",
        "partial_rotary_factor": 1.0,
        "attention_factor": None,
    }
    config.layer_types = ["full_attention", "full_attention"]
    assert identity.difference(config) == ""
    assert ModelIdentity("other name", model_facts(config)).sha256 == identity.sha256


def test_the_place_in_a_list_is_named() -> None:
    gemma = ModelIdentity("gemma", model_facts(MODELS["gemma3"].config()))
    config = MODELS["gemma3"].config()
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    words = "made for layer_types[2]=full_attention, this model has sliding_attention"
    assert gemma.difference(config) == words


def test_kinds_of_models_are_told_apart() -> None:
    identities = {
        name: ModelIdentity(name, model_facts(model.config())) for name, model in MODELS.items()
    }
    assert len({identity.sha256 for identity in identities.values()}) == len(MODELS)
    llama = identities["llama"]
    assert llama.difference(MODELS["qwen2"].config()) == "made for a llama model, this one is qwen2"
    assert "rope.full_attention.rope_theta" in identities["gemma3"].facts
    assert identities["gpt2"].facts["num_key_value_heads"] > 0
    assert not [name for name in identities["gpt2"].facts if name.startswith("rope")]


def test_a_text_model_inside_another_is_the_same_model() -> None:
    text = Gemma3TextConfig(num_hidden_layers=2)
    whole = Gemma3Config(text_config=text.to_dict())
    assert model_facts(whole) == model_facts(text)


def test_facts_are_plain_json_and_come_back(identity: ModelIdentity) -> None:
    assert ModelIdentity.from_json(json.loads(json.dumps(identity.as_json()))) == identity
    for model in MODELS.values():
        facts = model_facts(model.config())
        assert json.loads(json.dumps(facts)) == facts


def test_a_model_instead_of_its_configuration_is_a_mistake(identity: ModelIdentity) -> None:
    with pytest.raises(TypeError, match=r"config is a Linear: pass model\.config"):
        identity.difference(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_name_of_a_folder_here_is_not_told(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-llama").mkdir()
    assert ModelIdentity.of(llama, str(tmp_path / "my-llama")).name == "my-llama"
    monkeypatch.setattr(llama.config, "_name_or_path", "meta/llama")
    assert ModelIdentity.of(llama).name == "meta/llama"
    monkeypatch.setattr(llama.config, "_name_or_path", "")
    assert ModelIdentity.of(llama).name == "llama"
