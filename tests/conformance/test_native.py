"""Models with an indexer of their own: their choices, masks, positions, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, NativeKVCache, Selection, observe, registered_methods
from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.masks import base_mask, chosen_tokens, retrieval_mask, with_indices
from hf_kvret.contracts.index import Scoring
from hf_kvret.layer.indexed import IndexedLayer, attend_to_indices
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.models.compatibility import index_budget, reader_count, retrieval_shapes
from hf_kvret.testing import COVERING_OPTIONS, INDEXED_MODELS, MODELS
from hf_kvret.testing.indexed_models import known_indexed
from hf_kvret.testing.scenario import prompt, ragged

from .test_families import NO_PADDING

KNOWN = known_indexed()
pytestmark = pytest.mark.skipif(not KNOWN, reason="these models cache the keys of each head")
newest_models = pytest.mark.skipif(
    len(KNOWN) < len(INDEXED_MODELS), reason="this transformers lacks some of these models"
)
OPTIONS = {name: value for name, value in COVERING_OPTIONS.items() if name != "top_k"}


@pytest.fixture
def model() -> PreTrainedModel:
    return INDEXED_MODELS["deepseek_v32"].build()


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


def test_a_refused_pass_leaves_a_cache_to_save(model: PreTrainedModel, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "deepseek_v32_wide"])
def test_a_switched_model_gives_its_own_cache_the_same(name: str) -> None:
    model = INDEXED_MODELS[name].build()
    # transformers has no sdpa for Hy.
    attention = "eager" if name in ("deepseek_v32", "hy_v4", "hy_v4_vl") else "sdpa"
    ids, mask = ragged((80, 80 if name in NO_PADDING else 64))
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


def test_native_and_models_with_an_indexer_refuse_all_others(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="llama has no indexer of its own that native"):
        NativeKVCache(MODELS["llama"].config())
    for method, cls in registered_methods().items():
        if method != "native":
            with pytest.raises(ValueError, match="deepseek_v32 selects by an indexer of its own"):
                cls(model.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 13}, "the indexer of deepseek_v32 names 12 tokens"),
        ({"rest": "mean"}, "rest='mean': it has no meaning"),
        ({"prompt": "retrieve"}, "prompt='retrieve': it has no meaning"),
        ({"store": "higgs"}, "store='higgs': native keeps rows as they are"),
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


def test_a_base_without_a_mask_of_four_dims_is_refused() -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 4, "kv_length": 4, "q_offset": 0}
    carrier = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    indices = torch.tensor([[[[0, -1], [1, 4], [0, 9], [3, 3]]]])
    seen = with_indices(None, carrier, indices, "sdpa")
    assert seen[0, 0].int().argmax(1).tolist() == [0, 1, 0, 3] and seen.sum() == 4
    with pytest.raises(ValueError, match="flash_attention_2' has no mask for tokens"):
        with_indices(None, carrier, indices, "flash_attention_2")


@pytest.fixture
def carrier() -> torch.Tensor:
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2}
    return retrieval_mask(**arguments, attention_mask=None, device="cpu")


@pytest.mark.parametrize("base", ["eager", "sdpa"])
def test_a_restricted_mask_is_restricted_for_the_base_too(base: str, carrier: torch.Tensor) -> None:
    chosen = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = base_mask(carrier & chosen, base, torch.device("cpu"))
    expected = carrier[:, 0][:, None] & chosen
    assert seen is not None and torch.equal(seen if base == "sdpa" else seen == 0, expected)
    # The mask itself stays, for layers that don't choose.
    assert base_mask(carrier, base, torch.device("cpu")) is not seen
    restricted = carrier & chosen
    for wrong in (
        lambda: carrier & chosen[:, 0],
        lambda: carrier & chosen.int(),
        lambda: carrier & carrier,
        lambda: restricted & chosen,
        lambda: restricted[:, :, -1:],
        lambda: restricted[:, 0],
        lambda: chosen & carrier,
    ):
        with pytest.raises(ValueError, match="this model computes with its attention mask"):
            wrong()


def test_choices_become_tokens(carrier: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(indexer=SimpleNamespace(block_size=2))
    assert chosen_tokens(module, carrier, {}) is None
    indices = torch.tensor([[[3, 0], [1, 2], [0, 4]]] * 2, dtype=torch.int32)
    named = chosen_tokens(module, carrier, {"indices": indices})
    assert named is not None and torch.equal(named, indices.long()[:, None])
    blocks = torch.tensor([[[[1, -1], [0, 1], [2, 0]]]])
    named = chosen_tokens(module, carrier, {"block_indices": blocks})
    assert named is not None
    assert named.tolist() == [[[[2, 3, -1, -1], [0, 1, 2, 3], [4, 5, 0, 1]]]]
    chosen = torch.tensor([[[[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]]]] * 2).bool()
    expected = [[[0, 2, -1], [-1, -1, -1], [1, 2, 4]]] * 2
    for elements in (1 << 22, 1):
        monkeypatch.setattr("hf_kvret.attention.masks._ELEMENTS", elements)
        named = chosen_tokens(module, carrier & chosen, {})
        assert named is not None and named[:, 0].tolist() == expected


@newest_models
def test_blocks_behind_padding_are_refused() -> None:
    model = INDEXED_MODELS["minimax_m3"].build()
    ids, mask = ragged((40, 30))
    cache = NativeKVCache(model.config, **OPTIONS)
    with pytest.raises(ValueError, match="this model counts its blocks from the first token index"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    # The layer of full attention before it took its tokens.
    cache.crop(0)
    assert cache.get_seq_length() == 0
    cache.reset()
    answer = model.generate(ids[:1], past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(answer, model.generate(ids[:1], max_new_tokens=8, do_sample=False))


def test_a_choice_that_a_cache_does_not_follow_is_refused() -> None:
    model = MODELS["llama"].build()
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    hf_kvret.attach(model)
    attention = model.model.layers[0].self_attn
    query, rows = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    keys, values = cache.update(rows, rows, 0)
    with pytest.raises(ValueError, match="called with indices=Tensor"):
        retrieval_attention(attention, query, keys, values, None, indices=torch.zeros(1, 6, 1))
    assert not cache.layers[0].pending_attention
    keys, values = cache.update(rows, rows, 0)
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 6, "kv_length": 6, "q_offset": 0}
    carrier = retrieval_mask(**arguments, attention_mask=None, device="cpu")
    restricted = carrier & torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="this model restricts by itself what its attention sees"):
        retrieval_attention(attention, query, keys, values, restricted)
    assert not cache.layers[0].pending_attention


@newest_models
def test_a_model_whose_layers_all_have_full_attention_takes_every_method() -> None:
    config = AutoConfig.for_model("minimax_m3_vl_text")
    assert index_budget(config) == 0 and len(FlatKVCache(config).retrieval_layers) == 60
    with pytest.raises(ValueError, match="no indexer of its own that native can follow"):
        NativeKVCache(config)


@newest_models
def test_layers_that_share_keys_and_choose_for_themselves_are_refused() -> None:
    config = INDEXED_MODELS["mistral_large4"].config()
    assert reader_count(config) == 1
    assert [shape.head_dim for shape in retrieval_shapes(config).values()] == [24, 16, 24]
    config.text_config.indexer_types = ["full"] * 4
    with pytest.raises(ValueError, match="choose of them by an indexer of their own"):
        NativeKVCache(config)


@newest_models
def test_positions_of_an_indexer_follow_their_tokens() -> None:
    layer = NativeKVCache(INDEXED_MODELS["qwen4_exp"].config(), **OPTIONS).layers[1]
    assert isinstance(layer, IndexedLayer)
    rows, positions = torch.randn(2, 2, 9, 16), torch.arange(54).view(3, 2, 9)
    call = AttentionCall(
        Scoring(None, 1.0), lambda: rows, indices=torch.zeros(2, 1, 9, 1, dtype=torch.long)
    )
    for _ in range(2):
        # The first pass breaks off before attention.
        assert layer.indexer_position_ids is None
        layer.indexer_position_ids = positions
        keys, values = layer.update(rows, rows)
        layer.update_indexer(torch.randn(2, 9, 16))
    layer.attend(torch.randn(2, 4, 9, 16), keys, values, call)
    assert torch.equal(layer.indexer_position_ids, positions)
    twin = layer.fork()
    layer.crop(-2)
    assert torch.equal(layer.indexer_position_ids, positions[..., :7])
    twin.reset()
    assert twin.indexer_position_ids is None


@newest_models
def test_unregistering_leaves_no_patch_of_an_indexer() -> None:
    # Other tests may have attached such a model.
    hf_kvret.unregister()
    hf_kvret.register()
    model = INDEXED_MODELS["glm5_next"].build()
    ids = prompt(1, 40)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    cls = type(model.model.language_model.layers[1].self_attn)
    original = cls.build_attention_mask_from_topk
    hf_kvret.attach(model)
    assert cls.build_attention_mask_from_topk is not original
    hf_kvret.unregister()
    try:
        assert cls.build_attention_mask_from_topk is original
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    finally:
        hf_kvret.register()


def test_chunks_attend_as_a_whole(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
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
