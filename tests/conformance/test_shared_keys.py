"""Models some of whose layers read another's keys: chunks, masks, budgets, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

import hf_kvret
from hf_kvret import CTkvrCache, FlatKVCache, H2OCache, LRQKCache, RetrievalCache
from hf_kvret.attention.masks import mask_info, retrieval_mask
from hf_kvret.generate.chunks import recurs
from hf_kvret.models.compatibility import reader_count
from hf_kvret.testing import COVERING_OPTIONS, MODELS, SHARED_MODELS
from hf_kvret.testing.scenario import prompt, ragged


def test_long_prompts_of_models_with_readers_may_come_in_chunks() -> None:
    assert not recurs(FlatKVCache(SHARED_MODELS["gemma4_shared"].config()))
    assert recurs(FlatKVCache(MODELS["qwen3_next"].config()))


@pytest.mark.parametrize("name", SHARED_MODELS)
def test_keys_that_are_shared_over_devices_are_refused(name: str) -> None:
    model = SHARED_MODELS[name].build()
    hf_kvret.attach(model)
    hf_kvret.restore(model)
    model.model.get_submodule("norm" if hasattr(model.model, "norm") else "language_model.norm").to(
        "meta"
    )
    with pytest.raises(ValueError, match="lies on cpu, meta, between which these lose their cache"):
        hf_kvret.attach(model)


@pytest.mark.parametrize(
    ("keep", "attention", "recipe"),
    [(0, "sdpa", None), (1, "eager", None), (5, "sdpa", {"above": 0, "floor": 0, "top_k": 1.0})],
)
def test_readers_get_as_many_queries_as_logits_are_kept(
    keep: int, attention: str, recipe: dict[str, Any] | None
) -> None:
    model = SHARED_MODELS["gemma4_shared"].build()
    model.set_attn_implementation(attention)
    ids, mask = ragged((70, 55))
    options = {**COVERING_OPTIONS, **({} if recipe is None else {"prompt": recipe})}
    with torch.no_grad():
        # All logits are asked for here: where transformers cuts, depends on its own masks.
        expected = model(ids, attention_mask=mask).logits
        hf_kvret.attach(model)
        cache = FlatKVCache(model.config, **options)
        got = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=keep).logits
    valid = mask[:, -got.shape[1] :].bool()
    torch.testing.assert_close(got[valid], expected[:, -got.shape[1] :][valid], atol=1e-4, rtol=0)


def test_a_reader_retrieves_with_a_small_budget() -> None:
    model, ids = SHARED_MODELS["gemma4_shared"].build(), prompt(1, 200)
    cache = FlatKVCache(model.config, **{**COVERING_OPTIONS, "top_k": 8})
    model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    (layer,) = cache.stats()["layers"]
    # A layer with keys of its own and two readers, one KV head, four steps.
    assert layer["selected"] == 3 * 8 * 4


@pytest.mark.parametrize("cache_class", [LRQKCache, CTkvrCache, H2OCache])
def test_methods_that_learn_from_one_layer_are_refused(cache_class: type[RetrievalCache]) -> None:
    config = SHARED_MODELS["gemma3n"].config()
    with pytest.raises(
        ValueError, match=r"2 layers of gemma3n_text read .* take cache_implementation='paris'"
    ):
        cache_class(config)
    alone = AutoConfig.for_model("gemma4_text", num_kv_shared_layers=0)
    assert reader_count(config) == 2 and not reader_count(alone)


def test_a_mask_that_is_cut_twice_keeps_the_newest_queries() -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 9, "kv_length": 12, "q_offset": 3}
    whole = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    mask = whole[:, :, -5:, :]
    assert mask.shape == (1, 1, 5, 12) and mask[:, :, slice(-0, None)].shape == mask.shape
    info, first = mask_info(mask[:, :, -2:]), mask_info(whole)
    assert info is not None and first is not None
    seen = info.for_base("sdpa", torch.device("cpu"))
    assert seen is not None and seen[0, 0].sum(1).tolist() == [11, 12]
    assert first.for_base("sdpa", torch.device("cpu")) is not None


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), slice(0, 4), slice(None)),
        (slice(None), slice(None), slice(None, None, 2)),
        (slice(None), slice(None), slice(None), slice(3)),
        (slice(None), slice(None), torch.tensor([1])),
    ],
)
def test_other_cuts_of_a_mask_are_refused(index: Any) -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 9, "kv_length": 9, "q_offset": 0}
    mask = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    with pytest.raises(ValueError, match="computes with its attention mask"):
        mask[index]
