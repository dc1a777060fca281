"""The model that filled a cache is known, and another one is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel, Qwen2VLForConditionalGeneration

import hf_kvret
from hf_kvret.saved.identity import identity_of
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from ..generate.filled_caches import RUN, filled


def other_weights(model: Any) -> str:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return "filled by other weights"


def other_rope(model: Any) -> str:
    model.config.rope_parameters["rope_theta"] = 500000.0
    return "rope.rope_theta=10000.0, this model has 500000.0"


def other_dtype(model: Any) -> str:
    model.to(torch.bfloat16)
    return "dtype=float32, this model has bfloat16"


def other_quantization(model: Any) -> str:
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    return "quantization.quant_method=none, this model has gptq"


def other_type(model: Any) -> str:
    values = model.config.to_diff_dict()
    model.config = AutoConfig.for_model(**{**values, "model_type": "mistral"})
    return "made for model_type=llama, this model has mistral"


OTHERS = (other_weights, other_rope, other_dtype, other_quantization, other_type)


@pytest.mark.parametrize("change", OTHERS)
def test_another_model_is_refused(llama: Any, tmp_path: Path, change: Callable[[Any], str]) -> None:
    cache, ids = filled(llama)
    cache.save_pretrained(tmp_path, model=llama)
    other = copy.deepcopy(llama)
    words = change(other)
    with pytest.raises(ValueError, match=words):
        other.generate(ids, past_key_values=cache.fork(), **RUN)
    hf_kvret.attach(llama)
    if change is not other_type:  # its class and its configuration don't fit, but who asks it
        hf_kvret.attach(other)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            other(ids[:, 53:], past_key_values=cache.fork())
    with pytest.raises(ValueError, match=words):
        cache.save_pretrained(tmp_path / "again", model=other)
    with pytest.raises(ValueError, match=words):
        type(cache).from_pretrained(tmp_path, llama.config, model=other)
    loaded = type(cache).from_pretrained(tmp_path, llama.config)
    with pytest.raises(ValueError, match=words):
        other.generate(ids, past_key_values=loaded, **RUN)
    # Nothing was done yet: the model that filled it goes on.
    expected = llama.generate(ids, **RUN)
    assert torch.equal(llama.generate(ids, past_key_values=loaded, **RUN), expected)


def test_what_can_not_be_compared_is_named(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache, _ = filled(llama)
    offloaded = copy.deepcopy(llama)
    layer = offloaded.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    cache.check_model(offloaded)
    count = len(identity_of(llama).weights)
    assert f"1 of {count} digests of weights of the model that filled it could not" in caplog.text


def test_a_cache_filled_by_hand_has_no_identity_and_says_so(
    llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = hf_kvret.FlatKVCache(llama.config, **COVERING_OPTIONS)
    with torch.no_grad():
        hf_kvret.attach(llama)
        embeds = llama.get_input_embeddings()(prompt(1, 50))
        llama.model(inputs_embeds=embeds, past_key_values=cache)
    assert cache.identity == identity_of(llama)
    cache.forget_origin()
    cache.save_pretrained(tmp_path)
    loaded = type(cache).from_pretrained(tmp_path, llama.config, model=llama)
    assert "does not say which model filled it" in caplog.text
    llama.generate(prompt(1, 60, salt=5), past_key_values=loaded, **RUN)
    cache.save_pretrained(tmp_path, model=llama)
    assert type(cache).from_pretrained(tmp_path, llama.config).identity == identity_of(llama)


def test_a_text_model_goes_on_inside_a_composite_one(tmp_path: Path) -> None:
    """Names of weights are seen from the decoder."""
    model = MODELS["qwen2_vl"].build()
    assert isinstance(model, Qwen2VLForConditionalGeneration)
    whole = identity_of(model)
    alone = identity_of(model.get_decoder())
    assert alone.weights.items() < whole.weights.items()
    assert whole.difference(alone) == alone.difference(whole) == ""
    model.config.image_token_id += 1
    assert "the configuration around it" in whole.difference(identity_of(model))


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="adapters are PEFT's")


def with_adapter(peft: Any, model: PreTrainedModel, seed: int, name: str = "default") -> Any:
    """A copy of ``model`` with a random adapter."""
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    return peft.get_peft_model(copy.deepcopy(model), config, adapter_name=name).eval()


def test_another_adapter_is_refused(llama: Any, tmp_path: Path, peft: Any) -> None:
    adapted = with_adapter(peft, llama, seed=1)
    assert identity_of(llama).weights.items() < identity_of(adapted).weights.items()
    cache, ids = filled(adapted)
    cache.save_pretrained(tmp_path)
    loaded = type(cache).from_pretrained(tmp_path, llama.config)
    for other, words in (
        (llama, r"adapters=.*default, scaled by 2\.0.*, this model has none"),
        (with_adapter(peft, llama, seed=2), "filled by other weights: .*lora_A.default"),
        (with_adapter(peft, llama, seed=1, name="b"), r"this model has b, scaled by 2\.0"),
    ):
        with pytest.raises(ValueError, match=words):
            other.generate(input_ids=ids, past_key_values=loaded, **RUN)
    again = with_adapter(peft, llama, seed=1)
    expected = again.generate(input_ids=ids, **RUN)
    result = again.generate(input_ids=ids, past_key_values=loaded.fork(), **RUN)
    assert torch.equal(result, expected)
    cache, ids = filled(llama)
    with pytest.raises(ValueError, match=r"adapters=none, this model has .*default"):
        adapted.generate(input_ids=ids, past_key_values=cache, **RUN)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "disabled": lambda layer: layer.enable_adapters(False),
    "scaled": lambda layer: layer.set_scale("default", 0.25),
    # Unseen by autograd.
    "written": lambda layer: layer.lora_B["default"].weight.data.add_(0.1),
    "merged": lambda layer: layer.merge(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_changes_between_two_turns_is_refused(
    llama: Any, change: str, peft: Any
) -> None:
    adapted = with_adapter(peft, llama, seed=1)
    cache, ids = filled(adapted)
    adapted.generate(input_ids=ids, past_key_values=cache.fork(), **RUN)
    for layer in adapted.base_model.model.model.layers:
        CHANGES[change](layer.self_attn.v_proj)
    words = "filled by other weights" if change == "written" else "adapters"
    with pytest.raises(ValueError, match=words):
        adapted.generate(input_ids=ids, past_key_values=cache, **RUN)


def test_the_base_model_is_compared_below_adapters(llama: Any, peft: Any) -> None:
    adapted = with_adapter(peft, llama, seed=1)
    with adapted.disable_adapter():
        assert identity_of(adapted).weights == identity_of(llama).weights
        cache, ids = filled(adapted)
    llama.generate(ids, past_key_values=cache, **RUN)


def test_adapters_by_sequence_have_rows_of_their_own(llama: Any, tmp_path: Path, peft: Any) -> None:
    """As a server of many adapters calls PEFT: a shelf and a filled cache know whose rows it is."""
    lora = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama, lora, adapter_name="a").eval()
    model.add_adapter("b", copy.deepcopy(lora))
    ids, run = prompt(1, 100), {**RUN, "return_dict_in_generate": True}
    options = {**COVERING_OPTIONS, "shelf": str(tmp_path), "shelf_step": 64}
    call = {"cache_implementation": "flat", "cache_config": options}
    from_shelf, caches = [], {}
    for name in (None, "a", "b", "__base__", "b", None):
        own = {} if name is None else {"adapter_names": [name]}
        output = model.generate(input_ids=ids, **own, **call, **run)
        caches[name] = output.past_key_values
        from_shelf.append(caches[name].from_shelf)
        assert torch.equal(output.sequences, model.generate(input_ids=ids, **own, **RUN))
    assert from_shelf == [0, 0, 0, 0, 99, 99]
    # Last of all, as PEFT leaves its hooks where a call with names fails.
    for name, other in (("b", {}), (None, {"adapter_names": ["a"]})):
        longer = torch.cat([caches[name].input_ids, ids], 1)
        with pytest.raises(ValueError, match="adapters"):
            model.generate(input_ids=longer, past_key_values=caches[name], **other, **RUN)
