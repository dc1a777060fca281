"""Models with an indexer of their own: what transformers computes densely, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import NativeKVCache, Selection, observe, registered_methods
from hf_kvret.attention.masks import retrieval_mask, with_indices
from hf_kvret.layer.indexed import IndexedLayer, attend_to_indices
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.models.versions import INDEXED_MODELS_CACHE_LATENTS
from hf_kvret.testing import COVERING_OPTIONS, INDEXED_MODELS, MODELS, MODES, Case, run_case
from hf_kvret.testing.scenario import prompt, ragged

from ..pairs import full_product
from .cases import STORES, expect_passed, name_of
from .test_gemma4 import talk

pytestmark = pytest.mark.skipif(
    not INDEXED_MODELS_CACHE_LATENTS, reason="these models cache the keys of each head"
)
OPTIONS = {name: value for name, value in COVERING_OPTIONS.items() if name != "top_k"}
STORE_OPTIONS = {"split": {"device_budget": "20KB"}}
# transformers' own cache of these models fails in these modes.
IMPOSSIBLE = {"early_exit"}


def few_cases() -> list[dict[str, Any]]:
    rows = (
        ("deepseek_v32", "greedy_ragged", "resident"),
        ("deepseek_v32", "prompt_lookup", "host"),
        ("deepseek_v32_wide", "beams_ragged", "device"),
        ("glm_moe_dsa", "chunked_prefill", "split"),
        ("axk2", "second_turn_ragged", "cpu"),
        ("hy_v4", "crop_deep", "resident"),
    )
    return [dict(zip(("model", "mode", "store"), row, strict=True)) for row in rows]


def all_cases() -> list[dict[str, Any]]:
    stores = [*STORES, "split"]
    return full_product({"model": list(INDEXED_MODELS), "mode": list(MODES), "store": stores})


def check(model: str, mode: str, store: str) -> None:
    options = {**OPTIONS, "store": store, **STORE_OPTIONS.get(store, {})}
    result = run_case(Case(model, mode), lambda built: NativeKVCache(built.config, **options))
    expect_passed(result, IMPOSSIBLE)


@pytest.mark.parametrize("case", few_cases(), ids=name_of)
def test_native_gives_what_transformers_gives(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=name_of)
def test_all_modes_and_stores(case: dict[str, Any]) -> None:
    check(**case)


@pytest.fixture
def model() -> PreTrainedModel:
    return INDEXED_MODELS["deepseek_v32"].build()


def test_turns_forks_and_saved_caches(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = NativeKVCache(model.config, **{**OPTIONS, "max_draft": 16}, store="host")
    expected = talk(model, DynamicCache(config=model.config), None)
    for answer, wanted in zip(talk(model, cache, tmp_path), expected, strict=True):
        assert torch.equal(answer, wanted)


def test_only_what_the_indexer_names_is_read(model: PreTrainedModel) -> None:
    ids = prompt(1, 100)
    cache = NativeKVCache(model.config, **OPTIONS, store="host")
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert [layer["selected"] for layer in cache.stats()["layers"]] == [0, 0, 0]
    seen: list[Selection] = []
    hf_kvret.attach(model)
    with torch.no_grad(), observe(cache, seen.append):
        model(ids[:, :1], past_key_values=cache)
    for layer in cache.stats()["layers"]:
        assert 0 < layer["selected"] <= 12 and layer["steps"] == 1
        assert layer["cold_rows"] == layer["cold_tokens"] > 80
    assert len(seen) == 3
    report = cache.memory()
    layers = [layer for layer in cache.layers if isinstance(layer, IndexedLayer)]
    assert report.index == sum(layer.indexer.nbytes() for layer in layers)
    assert report.full_attention == 3 * 101 * (16 + 16 + 8) * 4


def test_a_cache_that_inference_mode_filled_goes_on_outside(model: PreTrainedModel) -> None:
    ids, logits = prompt(2, 60), []
    hf_kvret.attach(model)
    for context in (torch.inference_mode, torch.no_grad):
        cache = NativeKVCache(model.config, **OPTIONS)
        with context():
            model(ids, past_key_values=cache)
        with torch.no_grad():
            cache.reorder_cache(torch.tensor([1, 0]))
            logits.append(model(ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_a_refused_pass_leaves_a_cache_that_can_be_saved(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    ids = prompt(1, 60)
    cache = NativeKVCache(model.config, **OPTIONS)
    hf_kvret.attach(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="attention_mask has 5 columns"):
            model(ids[:, :1], past_key_values=cache, attention_mask=ids[:, :5])
        cache.save_pretrained(tmp_path)
        twins = cache.fork(), NativeKVCache.from_pretrained(tmp_path, model.config), cache
        results = [model(ids[:, :1], past_key_values=one).logits for one in twins]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_switched_model_gives_its_own_cache_the_same(
    attention: str, model: PreTrainedModel
) -> None:
    ids, mask = ragged((80, 64))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation(attention)
        hf_kvret.attach(model)
        cache = DynamicCache(config=model.config)
        got = model(ids, attention_mask=mask, past_key_values=cache).logits
        alone = model(ids[:1], past_key_values=DynamicCache(config=model.config)).logits
    valid = mask.bool()
    torch.testing.assert_close(got[valid], expected[valid], atol=1e-4, rtol=0)
    torch.testing.assert_close(alone[0], expected[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", registered_methods())
def test_native_and_models_with_an_indexer_refuse_all_others(
    method: str, model: PreTrainedModel
) -> None:
    other = MODELS["llama"].config()
    if method == "native":
        with pytest.raises(ValueError, match="llama has no indexer of its own that native"):
            NativeKVCache(other)
        return
    with pytest.raises(ValueError, match="deepseek_v32 selects by an indexer of its own"):
        registered_methods()[method](model.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 13}, "the indexer of deepseek_v32 names 12 tokens"),
        ({"rest": "mean"}, "rest='mean' has no meaning"),
        ({"prompt": "retrieve"}, "prompt='retrieve' has no meaning"),
        ({"store": "higgs"}, "store='higgs': native keeps rows as they are"),
        ({"select_heads": 1}, "native follows the model's own indexer"),
        ({"warn_lost_mass": 0.5}, "native follows the model's own indexer"),
    ],
)
def test_options_of_a_selection_are_refused(
    options: dict[str, Any], message: str, model: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=message):
        NativeKVCache(model.config, **options)
    cache = NativeKVCache(model.config, top_k=12, store="resident", slots=24)
    assert cache.options.top_k == 12
    with pytest.raises(ValueError, match="top_k: not an option that a filled cache can change"):
        cache.fork(top_k=8)
    with pytest.raises(ValueError, match="slots=11 is less than top_k=12"):
        NativeKVCache(model.config, store="resident", slots=11)


def test_a_saved_indexer_of_other_tokens_is_refused(model: PreTrainedModel) -> None:
    cache = NativeKVCache(model.config, **OPTIONS)
    model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=2, do_sample=False)
    layer = cache.layers[0]
    state = layer.state_dict()
    state["indexer.rows"] = state["indexer.rows"][:, :, 1:]
    twin = NativeKVCache(model.config, **OPTIONS).layers[0]
    with pytest.raises(ValueError, match=r"the indexer has keys .* not one for each of 1 x 61"):
        twin.load_state_dict(state, torch.device("cpu"))


def test_a_pass_that_broke_off_leaves_no_keys_of_the_indexer(model: PreTrainedModel) -> None:
    layer = NativeKVCache(model.config, **OPTIONS).layers[0]
    keys = torch.randn(1, 5, 16)
    for _ in range(2):
        assert torch.equal(layer.update_indexer(keys), keys)


def test_a_base_without_a_mask_of_four_dims_is_refused() -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4, "q_offset": 0}
    carrier = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    indices = torch.tensor([[[0], [1], [0], [3]]])
    seen = with_indices(None, carrier, indices, "sdpa")
    assert seen[0, 0].int().argmax(1).tolist() == [0, 1, 0, 3] and seen.sum() == 4
    with pytest.raises(ValueError, match="flash_attention_2' has no mask for tokens"):
        with_indices(None, carrier, indices, "flash_attention_2")


def test_mask_without_heads_is_that_of_the_base() -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2}
    carrier = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    assert carrier[:, 0, :, :].sum(2).tolist() == [[3, 4, 5]] * 2
    assert carrier[:, 0].dtype == torch.bool


def test_attention_in_chunks_of_queries_is_that_at_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LayerKV] = []

    def counted(kv: LayerKV, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls.append(kv)
        whole, ids = attend_to_indices(kv, *arguments)
        monkeypatch.setattr("hf_kvret.layer.indexed._ELEMENTS", 1 << 10)
        parts, ids_of_parts = attend_to_indices(kv, *arguments)
        monkeypatch.setattr("hf_kvret.layer.indexed._ELEMENTS", 1 << 24)
        torch.testing.assert_close(parts, whole)
        assert ids is None or (ids_of_parts is not None and torch.equal(ids_of_parts, ids))
        return whole, ids

    monkeypatch.setattr("hf_kvret.layer.indexed.attend_to_indices", counted)
    cache = NativeKVCache(model.config, **OPTIONS)
    model.generate(prompt(2, 90), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert len(calls) == 6
