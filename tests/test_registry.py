"""Names in transformers: registered, undone, and a switched model that goes on as before."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, RetrievalCache
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.testing import COVERING_OPTIONS, MODELS

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 10, "do_sample": False}
PREPARE = "_prepare_cache_for_generation"


@pytest.fixture
def names_again() -> Iterator[None]:
    """Registers the built-in methods again, whatever the test undid."""
    yield
    hf_kvret.register()


def _prompt(batch: int = 1, length: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 128, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 7 * row], mask[row, : 7 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _state() -> tuple[Any, ...]:
    """Everything in transformers that registering touches."""
    return (
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        getattr(GenerationMixin, PREPARE),
        dict(type(ALL_ATTENTION_FUNCTIONS)._global_mapping),
        dict(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping),
    )


def _reads_cold(cache: RetrievalCache) -> bool:
    return all(layer["selected"] > 0 for layer in cache.stats()["layers"])


def test_four_ways_to_ask_give_the_same_tokens(llama: PreTrainedModel, tmp_path: Path) -> None:
    inputs = _prompt(2)
    llama.generation_config.max_new_tokens = 10
    expected = llama.generate(**inputs, do_sample=False)

    by_name = llama.generate(
        **inputs, do_sample=False, cache_implementation="paris", cache_config=SMALL
    )
    assert torch.equal(by_name, expected)

    cache = ParisKVCache(config=llama.config, **SMALL)
    assert torch.equal(llama.generate(**inputs, do_sample=False, past_key_values=cache), expected)
    assert _reads_cold(cache)

    hf_kvret.restore(llama)
    llama.generation_config.cache_config = SMALL
    llama.save_pretrained(tmp_path / "attention")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "attention", attn_implementation="paris"
    )
    result = loaded.generate(**inputs, do_sample=False, return_dict_in_generate=True)
    assert isinstance(result.past_key_values, ParisKVCache) and _reads_cold(result.past_key_values)
    assert torch.equal(result.sequences, expected)

    llama.generation_config.cache_implementation = "paris"
    llama.save_pretrained(tmp_path / "config")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "config")
    assert saved.generation_config.cache_implementation == "paris"
    result = saved.generate(**inputs, do_sample=False, return_dict_in_generate=True)
    assert isinstance(result.past_key_values, ParisKVCache) and _reads_cold(result.past_key_values)
    assert torch.equal(result.sequences, expected)


def test_a_second_turn_works_beside_the_name_in_the_saved_config(llama: PreTrainedModel) -> None:
    inputs = _prompt()
    more = _prompt(1, 9)["input_ids"]
    first = llama.generate(**inputs, **RUN)
    second = torch.cat([first, more], dim=1)
    expected = llama.generate(input_ids=second, attention_mask=torch.ones_like(second), **RUN)

    llama.generation_config.cache_implementation = "paris"
    llama.generation_config.cache_config = SMALL
    result = llama.generate(**inputs, **RUN, return_dict_in_generate=True)
    cache = result.past_key_values
    assert isinstance(cache, ParisKVCache) and torch.equal(result.sequences, first)
    again = llama.generate(
        input_ids=second, attention_mask=torch.ones_like(second), past_key_values=cache, **RUN
    )
    assert torch.equal(again, expected)
    assert cache.get_seq_length() == second.shape[1] + 9
    assert llama.generation_config.cache_implementation == "paris", "the saved config is untouched"


def test_nothing_of_ours_is_written_into_a_saved_config(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    before = llama.config.to_dict()
    llama.generate(**_prompt(), **RUN, cache_implementation="flat", cache_config=SMALL)
    assert llama.config._attn_implementation == "hf_kvret"
    assert llama.config.to_dict() == before
    llama.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert not re.search(r"kvret|\"flat\"", file.read_text())


@pytest.mark.usefixtures("names_again")
def test_undoing_puts_switched_models_back(llama: PreTrainedModel) -> None:
    inputs = _prompt(2)
    expected = llama.generate(**inputs, **RUN)
    eager = MODELS["llama"].build()
    eager.set_attn_implementation("eager")
    composite = MODELS["qwen2_vl"].build()
    for model in (llama, eager, composite):
        model.generate(**inputs, **RUN, cache_implementation="flat", cache_config=SMALL)
    assert composite.config.text_config._attn_implementation == "hf_kvret"
    assert composite.config.vision_config._attn_implementation == "sdpa"
    hf_kvret.unregister()
    assert llama.config._attn_implementation == "sdpa"
    assert eager.config._attn_implementation == "eager"
    assert composite.config.text_config._attn_implementation == "sdpa"
    assert torch.equal(llama.generate(**inputs, **RUN), expected)
    with pytest.raises(ValueError, match="cache_implementation"):
        llama.generate(**inputs, **RUN, cache_implementation="flat")


@pytest.mark.usefixtures("names_again")
def test_a_model_loaded_with_our_name_can_be_put_back_afterwards() -> None:
    config = MODELS["llama"].config()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="paris").eval()
    with torch.no_grad():
        expected = model(**_prompt(2)).logits
    hf_kvret.unregister()
    with pytest.raises(KeyError, match="paris"):
        model(**_prompt(2))
    hf_kvret.restore(model)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(**_prompt(2)).logits, expected)


def test_restore_is_idempotent_and_spares_other_models(llama: PreTrainedModel) -> None:
    other = MODELS["qwen2"].build()
    hf_kvret.restore(llama)
    assert llama.config._attn_implementation == "sdpa"
    hf_kvret.attach(llama)
    hf_kvret.attach(llama)
    hf_kvret.attach(other)
    for _ in range(2):
        hf_kvret.restore(llama)
        assert llama.config._attn_implementation == "sdpa"
    assert other.config._attn_implementation == "hf_kvret"
    hf_kvret.restore(other)


@pytest.mark.usefixtures("names_again")
def test_a_class_of_ones_own_is_registered_and_undone(llama: PreTrainedModel) -> None:
    class MineKVCache(FlatKVCache):
        name = "mine"

    hf_kvret.register(MineKVCache)
    named = {"cache_implementation": "mine", "cache_config": SMALL}
    result = llama.generate(**_prompt(), **RUN, **named, return_dict_in_generate=True)
    assert type(result.past_key_values) is MineKVCache
    hf_kvret.unregister()
    hf_kvret.register()
    assert "mine" not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS


def test_a_draft_model_keeps_a_cache_of_its_own(llama: PreTrainedModel) -> None:
    """``generate`` hands the main model's name and options down to it."""
    inputs, draft = _prompt(), MODELS["llama"].build()
    expected = llama.generate(**inputs, **RUN)
    caches = []

    def noting(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(type(kwargs[CACHE_NAME]))

    draft.register_forward_pre_hook(noting, with_kwargs=True)
    named = {"cache_implementation": "paris", "cache_config": SMALL}
    result = llama.generate(
        **inputs, **RUN, **named, assistant_model=draft, return_dict_in_generate=True
    )
    assert torch.equal(result.sequences, expected)
    assert _reads_cold(result.past_key_values)
    assert caches and set(caches) == {DynamicCache}
    assert draft.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("names_again")
@pytest.mark.parametrize("taken", ["dynamic", "paris", "sdpa", "hf_kvret"])
def test_a_name_that_is_taken_is_refused_and_nothing_changes(taken: str) -> None:
    before = _state()
    cls = type("TakenKVCache", (FlatKVCache,), {"name": taken})
    with pytest.raises(ValueError, match=f"the name '{taken}' is taken"):
        hf_kvret.register(cls)
    for cls in (3, DynamicCache, RetrievalCache, type("Unnamed", (FlatKVCache,), {"name": 3})):
        with pytest.raises(TypeError, match="pass a subclass of RetrievalCache with a name"):
            hf_kvret.register(cls)
    assert _state() == before
