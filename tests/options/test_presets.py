"""Presets: what a paper gives, by name, wherever options go."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.tune.variants import make_variants
from hf_kvret.methods.paris import ParisConfig

PUBLISHED = ("a2ats", "aqua", "ctkvr", "lrqk", "paris")
SMALL = {"top_k": 8, "recent": 8, "flush": 8, "dense_below": 0}


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_preset_is_its_options_written_out(method: str) -> None:
    config = hf_kvret.registered_methods()[method].Config
    paper = config.preset("paper")
    assert paper == config(**config.presets["paper"]) != config()
    assert paper == config.from_options(preset="paper") == config().replace(preset="paper")
    assert config.from_options(**json.loads(json.dumps(dataclasses.asdict(paper)))) == paper


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        *(
            ("paris", {"preset": name}, "ParisConfig has no preset .*: choose 'paper'")
            for name in ("papers", 3, ["paper"])
        ),
        ("paris", {"presets": "paper"}, "no option 'presets': did you mean 'preset'"),
        ("flat", {"preset": "paper"}, "has no preset 'paper': it has none"),
    ],
)
def test_an_unknown_preset_names_those_there_are(
    method: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        hf_kvret.registered_methods()[method].Config.from_options(**options)


def test_generate_takes_a_preset(llama: PreTrainedModel) -> None:
    tokens = torch.randint(3, llama.config.vocab_size, (1, 60))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    options = {"preset": "paper", **SMALL}
    by_name = llama.generate(
        **inputs, cache_implementation="paris", cache_config=options, max_new_tokens=9
    )
    cache = hf_kvret.ParisKVCache(llama.config, **options)
    assert cache.options == ParisConfig.preset("paper", **SMALL)
    assert torch.equal(by_name, llama.generate(**inputs, past_key_values=cache, max_new_tokens=9))


def test_a_preset_in_a_table_has_its_own_budget() -> None:
    chosen = choose_cache("paris:preset=paper", {"top_k": 17, "store": "host"}).options
    assert chosen is not None and (chosen.top_k, chosen.store) == (100, "host")
    equal = choose_cache("paris:preset=paper:top_k=0.06", {"top_k": 17}).options
    assert equal == ParisConfig.preset("paper", top_k=0.06)


def test_tune_tries_a_preset_at_its_own_budget() -> None:
    variants = make_variants(["paris:rest=none", "paris:preset=paper:rest=none"], [64, 128], 4000)
    budgets = {name: variant.cache_config["top_k"] for name, variant in variants.items()}
    assert [*budgets.values()] == [64, 128, 100]
