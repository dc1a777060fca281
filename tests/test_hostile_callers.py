"""What models and their wrappers do between cache and attention, and what callers get wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, attach
from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.masks import base_mask, retrieval_mask
from hf_kvret.cli import main
from hf_kvret.lab.evaluate import measurement
from hf_kvret.testing import COVERING_OPTIONS, MODELS

from .saved_files import read_saved, write_saved

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


def _ids(rows: int = 1, length: int = 60) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(4))


def _copy_inputs_of_later_layers(model: PreTrainedModel) -> None:
    """What a device map does: hooks that hand every tensor on as a copy."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ours", [True, False], ids=["retrieval", "dynamic"])
def test_a_device_map_copies_masks_and_changes_nothing(
    llama: PreTrainedModel, ours: bool, padded: bool
) -> None:
    ids, mask = _ids(2), torch.ones(2, 60, dtype=torch.long)
    if padded:
        mask[0, :13] = 0
    expected = llama.generate(ids, attention_mask=mask, **GREEDY)
    attach(llama)
    _copy_inputs_of_later_layers(llama)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS) if ours else DynamicCache()
    got = llama.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(got, expected)


def test_a_mask_that_lost_its_meaning_is_never_read_as_another() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        bare = retrieval_mask(batch_size=2, q_length=5, kv_length=5).as_subclass(torch.Tensor)
    with pytest.raises(ValueError, match=r"hf_kvret\.restore\(model\)"):
        base_mask(bare, "sdpa", torch.device("cpu"))


def test_values_that_change_after_the_cache_are_refused(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    key, value = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    handle, _ = cache.update(key, value, 0)
    module = llama.model.layers[0].self_attn
    with pytest.raises(ValueError, match="changes keys or values between its cache"):
        retrieval_attention(module, torch.randn(1, 4, 9, 16), handle, value * 2, None)


@pytest.mark.parametrize("cls", [FlatKVCache, ParisKVCache])
def test_a_cache_filled_in_inference_mode_goes_on_outside(
    llama: PreTrainedModel, cls: type[hf_kvret.RetrievalCache]
) -> None:
    ids = _ids()
    expected = llama.generate(ids, **GREEDY)
    attach(llama)
    cache = cls(llama.config, **COVERING_OPTIONS)
    with torch.inference_mode():
        llama(ids[:, :-2], past_key_values=cache)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_a_refused_call_leaves_the_filled_cache_usable(llama: PreTrainedModel) -> None:
    ids = _ids()
    attach(llama)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        too_long = torch.ones(1, 70, dtype=torch.long)
        with pytest.raises(ValueError, match="attention_mask has 70 columns"):
            llama(ids[:, :1], past_key_values=cache, attention_mask=too_long)
        again = llama(ids[:, :1], past_key_values=cache).logits
        exact = llama(torch.cat([ids, ids[:, :1]], 1), past_key_values=DynamicCache()).logits
    # fp32 sums in another order.
    torch.testing.assert_close(again[:, -1], exact[:, -1], atol=3e-4, rtol=0)


def test_options_that_contradict_the_given_cache_are_refused(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config, top_k=32)
    with pytest.raises(ValueError, match="asks for top_k=64, past_key_values has 32"):
        llama.generate(_ids(), past_key_values=cache, cache_config={"top_k": 64}, **GREEDY)
    with pytest.raises(ValueError, match="did you mean 'top_k'"):
        llama.generate(_ids(), past_key_values=cache, cache_config={"top_kk": 32}, **GREEDY)
    llama.generate(_ids(), past_key_values=cache, cache_config={"top_k": 32}, **GREEDY)


def test_float64_is_refused_with_the_way_out(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config)
    key = torch.randn(1, 2, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64.*model\.to\(torch\.float32\)"):
        cache.update(key, key, 0)


def test_models_whose_cache_is_not_what_they_attend_to_are_refused() -> None:
    shared = LlamaConfig(num_hidden_layers=2)
    shared.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="shares keys and values between layers"):
        FlatKVCache(shared)
    split = LlamaConfig(num_hidden_layers=2)
    split.model_type = "diffllama"
    with pytest.raises(ValueError, match="splits its values after the cache"):
        FlatKVCache(split)


def test_a_saved_cache_that_lost_a_layer_is_refused(llama: PreTrainedModel, tmp_path: Any) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(_ids(), past_key_values=cache, **GREEDY)
    cache.save_pretrained(tmp_path)
    description, tensors = read_saved(tmp_path)
    kept = {name: value for name, value in tensors.items() if not name.startswith("layers.1.")}
    write_saved(tmp_path, description, kept)
    with pytest.raises(ValueError, match="hold different numbers of tokens"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


def test_chunked_prefill_leaves_a_window_of_working_size() -> None:
    """After a dense phase of 600 tokens the window is as small as after one long prompt."""
    config = MODELS["llama"].config()
    options: dict[str, Any] = {"sink": 2, "recent": 8, "flush": 8, "max_draft": 4}
    sizes = []
    for steps in ([1200], [100] * 12):
        cache = FlatKVCache(config, dense_below=600, **options)
        (layer, *_) = cache.retrieval_layers
        for length in steps:
            keys = torch.randn(1, 2, length, 16)
            layer.update(keys, keys)
            layer.pending_attention = False
            layer.kv.take_prompt(keys, keys, None)
        sizes.append(layer.kv.window.keys.shape[2])
    assert sizes == [2 + 8 + 8 + 4] * 2


def test_restore_puts_back_every_part_of_a_composite_model(tmp_path: Path) -> None:
    from transformers import Qwen2VLForConditionalGeneration as Model

    MODELS["qwen2_vl"].build().save_pretrained(tmp_path)
    model = Model.from_pretrained(tmp_path, attn_implementation="paris")
    hf_kvret.restore(model)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa"] * 3


@pytest.mark.parametrize(("cache_layers", "model_layers"), [(2, 3), (3, 2)])
def test_a_cache_for_another_number_of_layers_is_refused(
    cache_layers: int, model_layers: int
) -> None:
    from transformers import AutoModelForCausalLM

    configs = [MODELS["llama"].config() for _ in range(2)]
    configs[0].num_hidden_layers, configs[1].num_hidden_layers = cache_layers, model_layers
    model = AutoModelForCausalLM.from_config(configs[1]).eval()
    with pytest.raises(ValueError, match="layers"):
        model.generate(_ids(), past_key_values=FlatKVCache(configs[0], **COVERING_OPTIONS))


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(measurement, "measure", lambda *a: pytest.fail("the demo ran first"))
    assert main(["demo", "--plot", "x.png"]) == 2


def test_more_mistakes_print_one_line() -> None:
    assert main(["demo", "--context", "2000", "--caches", ","]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert main(["demo", "--context", "2000", "--device", "cuda"]) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"tiers": (0.5,) * 16},
        {"center": 2},
        {"seed": "x"},
        {"levels": ("a",) * 8},
        {"tiers": 5},
        {"subspace_dim": 8.0},
    ],
)
def test_paris_options_are_checked_when_they_are_given(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        ParisKVCache(MODELS["llama"].config(), **options)


def test_generate_batch_is_refused_with_the_remedy(llama: PreTrainedModel) -> None:
    llama.generation_config.cache_implementation = "paris"
    with pytest.raises(ValueError, match=r"hf_kvret\.restore\(model\)"):
        llama.generate_batch(inputs=[[5, 6, 7]])
