"""A2ATSCache on models: codes follow their tokens wherever these go, positions, padding, saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import ColdTokens
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSIndex
from hf_kvret.testing import COVERING_OPTIONS, MODELS, Case, run_case
from hf_kvret.testing.scenario import prompt, ragged

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 6}
ArtifactOf = Callable[..., str]
SLOW = pytest.mark.slow


@pytest.fixture(scope="session")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> ArtifactOf:
    """The artifact of a model of the zoo, made when it is asked for."""
    made: dict[tuple[str, str], str] = {}

    def find(name: str, space: str = "windowed") -> str:
        if (name, space) not in made:
            folder = tmp_path_factory.mktemp(f"a2ats-{name}-{space}")
            made[name, space] = tiny_artifact(MODELS[name].build(), "a2ats", folder, space=space)
        return made[name, space]

    return find


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


class _CheckedIndex(A2ATSIndex):
    """Encodes the store's keys anew before each selection, and leaves tokens out before it takes
    all: with a budget for all, wrong codes would change nothing."""

    checked: ClassVar[list[int]] = []

    def build(self, cold: ColdTokens) -> None:
        self._check(cold)

    def before_search(self, cold: ColdTokens) -> None:
        self._check(cold)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> Any:
        some = super().search(query, replace(cold, budget=max(1, len(cold) // 4)))
        flat = some.flatten(1).long()
        assert cold.valid.gather(1, flat.clamp(min=0))[flat >= 0].all()
        return super().search(query, replace(cold, budget=len(cold)))

    def _check(self, cold: ColdTokens) -> None:
        # The first valid tokens of a row are sinks and not valid here.
        positions = (cold.valid.long().cumsum(-1) - 1 + COVERING_OPTIONS["sink"]).clamp(min=0)
        learned = self._on(positions.device)
        keys = torch.cat([keys for _, keys, _ in cold.store.chunks()], dim=2)
        z = learned.space.keys(keys, positions) @ learned.metric
        away = (z.unsqueeze(-2) - learned.words.unsqueeze(1)).square().sum(-1)
        codes = self._codes.rows[:, :, : len(cold), None].long()
        excess = away.gather(3, codes)[..., 0] - away.amin(-1)
        valid = cold.valid[:, None].expand_as(excess)
        assert (excess <= 1e-3 * z.square().sum(-1))[valid].all(), "a code of another key"
        self.checked.append(int(valid.sum()))


class _CheckedCache(A2ATSCache):
    @classmethod
    def make_index(cls, options: Any, layer: int) -> A2ATSIndex:
        return _CheckedIndex(options, layer)


@pytest.mark.parametrize("mode", ["beams_ragged", "prompt_lookup", "chunked_prefill", "crop_deep"])
@pytest.mark.parametrize(
    "name", ["gpt_oss", *(pytest.param(each, marks=SLOW) for each in ("gemma2", "qwen2_vl"))]
)
def test_codes_are_of_their_tokens_in_every_mode_of_use(
    name: str, mode: str, artifact_of: ArtifactOf
) -> None:
    artifact = artifact_of(name, "rotated" if name == "qwen2_vl" else "windowed")
    options = {**COVERING_OPTIONS, "artifact": artifact}
    _CheckedIndex.checked.clear()
    result = run_case(Case(name, mode), lambda model: _CheckedCache(config=model.config, **options))
    if result.status == "skipped":
        pytest.skip(result.detail)
    assert result.status == "passed", result.detail
    assert sum(_CheckedIndex.checked) > 100


# Rows without RoPE in some layers, with learned positions, of YaRN.
@pytest.mark.parametrize("name", ["smollm3", "gpt2", "gpt_oss"])
def test_codes_don_t_depend_on_padding_or_on_where_positions_begin(
    name: str, artifact_of: ArtifactOf
) -> None:
    model = MODELS[name].build()
    hf_kvret.attach(model)
    ids, mask = ragged((60, 41))
    expected = _cache(model, artifact_of(name))
    _read(model, expected, ids[1:, 19:])
    padded = _cache(model, artifact_of(name))
    _read(model, padded, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    assert _same(_codes(padded)[:, 1:, :, 19:], _codes(expected)) > 0.99
    if name == "gpt2":
        return  # its positions are learned, and part of its keys
    moved = _cache(model, artifact_of(name))
    _read(model, moved, ids[1:, 19:], position_ids=torch.arange(300, 341)[None])
    assert _same(_codes(moved), _codes(expected)) > 0.99


def test_without_positions_nothing_is_taken_in(
    llama: PreTrainedModel, artifact_of: ArtifactOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _cache(llama, artifact_of("llama"))
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
    with pytest.raises(ValueError, match=r"positions of three parts.*--space rotated"):
        _cache(model, artifact_of("qwen2_vl"))
    cache = _cache(model, artifact_of("qwen2_vl", "rotated"))
    model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.stats()["layers"][0]["selected"] > 0
    # The text decoder by itself knows no images.
    text = model.config.get_text_config()
    assert A2ATSCache(config=text, artifact=artifact_of("qwen2_vl")).options.artifact
