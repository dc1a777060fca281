"""A2ATSCache on models: codes follow their tokens wherever these go, positions, padding, saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 6}
ArtifactOf = Callable[..., str]
SLOW = pytest.mark.slow


def _cache(model: PreTrainedModel, artifact: str, **changes: Any) -> A2ATSCache:
    return A2ATSCache(config=model.config, artifact=artifact, **{**SMALL, **changes})


@torch.no_grad()
def _read(model: PreTrainedModel, cache: A2ATSCache, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    """Logits ``[B, n, V]`` of more tokens."""
    return model(ids, past_key_values=cache, **how).logits


def _codes(cache: A2ATSCache) -> torch.Tensor:
    """``[layers, B, Hkv, n]``: those of all tokens that the cache holds."""
    length = cache.get_seq_length()
    rows = [layer.kv.index._codes.rows for layer in cache.retrieval_layers]
    return torch.stack([row[:, :, :length] for row in rows])


def _same(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of codes that agree; of two codewords almost as near, rounding chooses."""
    assert result.shape == expected.shape
    return float((result == expected).float().mean())


# Rows without RoPE in some layers, with learned positions, of YaRN.
@pytest.mark.parametrize("name", ["smollm3", "gpt2", "gpt_oss"])
def test_codes_don_t_depend_on_padding_or_on_where_positions_begin(
    name: str, artifact_of: ArtifactOf
) -> None:
    model = MODELS[name].build()
    hf_kvret.attach(model)
    ids, mask = ragged((60, 41))
    expected = _cache(model, artifact_of("a2ats", name))
    _read(model, expected, ids[1:, 19:])
    padded = _cache(model, artifact_of("a2ats", name))
    _read(model, padded, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    assert _same(_codes(padded)[:, 1:, :, 19:], _codes(expected)) > 0.99
    if name == "gpt2":
        return  # its positions are learned, and part of its keys
    moved = _cache(model, artifact_of("a2ats", name))
    _read(model, moved, ids[1:, 19:], position_ids=torch.arange(300, 341)[None])
    assert _same(_codes(moved), _codes(expected)) > 0.99


def test_codes_follow_their_tokens_through_crops_and_other_orders(
    llama: PreTrainedModel, artifact_of: ArtifactOf
) -> None:
    cache, (ids, mask) = _cache(llama, artifact_of("a2ats", "llama")), ragged((60, 41))
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    _read(llama, cache, ids, attention_mask=mask, position_ids=places)
    expected, turned = _codes(cache), [1, 0]
    cache.crop(-25)
    cache.reorder_cache(torch.tensor(turned))
    # Others take the slots of what was dropped, and then the same.
    _read(llama, cache, ids[:, :9], position_ids=torch.arange(200, 209)[None])
    cache.crop(-9)
    more = {"attention_mask": mask[turned], "position_ids": places[turned, 35:]}
    _read(llama, cache, ids[turned, 35:], **more)
    assert _same(_codes(cache), expected[:, turned]) > 0.99


def test_without_positions_nothing_is_taken_in(
    llama: PreTrainedModel, artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _cache(llama, artifact_of("a2ats", "llama"))
    with monkeypatch.context() as patch:
        patch.setattr("hf_kvret.attention.attention._positions", lambda ids, query: None)
        with pytest.raises(ValueError, match="pass position_ids to the model, or use another"):
            _read(llama, cache, prompt(1, 60))
    assert cache.get_seq_length() == 0
    _read(llama, cache, prompt(1, 60))
    assert cache.get_seq_length() == 60


def test_a_model_with_images_is_refused_unless_keys_stay_rotated(artifact_of: ArtifactOf) -> None:
    """Its attention is told positions that are not those of its RoPE, or none."""
    model = MODELS["qwen2_vl"].build()
    windowed = artifact_of("a2ats", "qwen2_vl", space="windowed")
    with pytest.raises(ValueError, match=r"positions of three parts.*--space rotated"):
        _cache(model, windowed)
    cache = _cache(model, artifact_of("a2ats", "qwen2_vl"))
    model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.stats()["layers"][0]["selected"] > 0
    # The text decoder by itself knows no images.
    text = model.config.get_text_config()
    assert A2ATSCache(config=text, artifact=windowed).options.artifact
