"""Caches with an artifact, which is found, read once, checked, refused; what A2ATS makes of it."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret import registered_methods
from hf_kvret.artifacts import CalibrationArtifact, files
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged

from ..saved.saved_files import read_saved, write_saved
from .aqua_caches import attached, read

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 6}
# Spaces of rows before RoPE and after it, and the way out of one who has no positions.
SPACES = {
    "a2ats": ("windowed", "rotated", "or use another"),
    "aqua": ("before", "after", "use predictor='none'"),
}
RUN: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def _calibrate(model: PreTrainedModel, folder: Path, seed: int = 0) -> None:
    tiny_artifact(model, "a2ats", folder, codewords=16, seed=seed)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the zoo's Llama; not to be written to."""
    folder = tmp_path_factory.mktemp("a2ats")
    _calibrate(MODELS["llama"].build(), folder)
    return folder


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "artifact"))


def _fill(model: PreTrainedModel, cache: A2ATSCache) -> torch.Tensor:
    """The prompt and the answer."""
    return model.generate(prompt(1, 60), past_key_values=cache, **RUN)


def test_generate_takes_it_by_name(llama: PreTrainedModel, artifact: Path) -> None:
    result = llama.generate(
        prompt(1, 60),
        cache_implementation="a2ats",
        cache_config={**COVERING_OPTIONS, "artifact": str(artifact)},
        return_dict_in_generate=True,
        **RUN,
    )
    assert type(result.past_key_values) is A2ATSCache
    assert result.past_key_values.stats()["layers"][1]["codewords"] == 16
    assert torch.equal(result.sequences, llama.generate(prompt(1, 60), **RUN))
    with pytest.raises(ValueError, match="hf-kvret calibrate a2ats --model MODEL"):
        llama.generate(prompt(1, 60), cache_implementation="a2ats", **RUN)


def test_the_models_folder_may_have_it(tmp_path: Path, llama: PreTrainedModel, made: Path) -> None:
    home = tmp_path / "model"
    llama.save_pretrained(home)
    loaded = AutoModelForCausalLM.from_pretrained(home)
    with pytest.raises(ValueError, match=rf"artifact='folder-or-hub-id'.*--model {home} "):
        A2ATSCache(loaded.config)
    shutil.copytree(made, home / "a2ats")
    assert A2ATSCache(loaded.config).options.artifact == str(home / "a2ats")


@pytest.mark.parametrize(
    ("method", "name", "options", "message"),
    [
        ("paris", "llama", {}, "artifact of 'paris', not of 'a2ats'"),
        ("a2ats", "qwen2", {}, "made for model_type=llama, this model has qwen2"),
        ("a2ats", "llama", {"revision": "v1"}, "only artifacts on the hub have rev"),
        ("a2ats", "llama", {"artifact": None, "revision": "v1"}, "without artifact: "),
    ],
)
def test_an_artifact_of_another_model_or_method_is_refused_when_the_cache_is_made(
    method: str, name: str, options: dict[str, Any], message: str, artifact: Path
) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact)
    shutil.rmtree(artifact)
    dataclasses.replace(whole, method=method).save_pretrained(artifact)
    with pytest.raises(ValueError, match=message):
        A2ATSCache(MODELS[name].config(), **{"artifact": artifact, **options})


def test_an_artifact_of_other_options_is_refused(llama: PreTrainedModel, artifact: Path) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact)
    options = {**whole.options, "window": "2048"}
    dataclasses.replace(whole, options=options).save_pretrained(artifact)
    message = r"wrong option \(distance must be .*, got '2048'.*hf-kvret calibrate a2ats"
    with pytest.raises(ValueError, match=message):
        A2ATSCache(llama.config, artifact=artifact)


def test_other_weights_are_refused_by_generate_and_can_be_checked_by_hand(artifact: Path) -> None:
    model = MODELS["llama"].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    cache = A2ATSCache(model.config, artifact=artifact, **SMALL)
    for check in (_fill, lambda model, cache: cache.check_model(model)):
        with pytest.raises(ValueError, match="was made from other weights"):
            check(model, cache)
    assert cache.get_seq_length() == 0


def test_a_folder_that_was_rewritten_is_read_anew(llama: PreTrainedModel, artifact: Path) -> None:
    quantizers = []
    for seed in (0, 1):
        _calibrate(llama, artifact, seed)
        cache = A2ATSCache(llama.config, artifact=artifact, **SMALL)
        _fill(llama, cache)
        quantizers.append(cache.retrieval_layers[0].kv.index._quantizer)
    assert not torch.equal(quantizers[0].words, quantizers[1].words)
    # A cache that has read it does not need it any more.
    artifact.rename(artifact.with_name("moved"))
    cache.check_model(llama)


def test_the_published_options() -> None:
    default, paper = A2ATSConfig(), A2ATSConfig.preset("paper", artifact="a", sink=8)
    assert (default.budget_of, default.top_k, default.sink, default.recent) == ("head", 0.06, 4, 64)
    # 3% of 10,000 tokens for each of the four query heads of Llama-3.1-8B.
    assert (paper.budget_of, paper.budget(10_000) // 4, paper.recent) == ("union", 300, 64)
    assert (paper.artifact, paper.sink) == ("a", 8)


def test_an_artifact_that_a_saved_cache_names_is_not_followed(
    llama: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder that is there, nor a repository of the hub, with whatever revision."""
    cache = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, cache)
    cache.save_pretrained(tmp_path / "saved")
    description, _ = read_saved(tmp_path / "saved")
    refuse = Mock(side_effect=AssertionError("it was followed"))
    for changes in ({}, {"artifact": "stranger/evil", "revision": "v1"}):
        options = description["options"] | changes
        write_saved(tmp_path / "saved", {**description, "options": options})
        with monkeypatch.context() as patch:
            patch.setattr(files, "snapshot_download", refuse)
            patch.setattr(CalibrationArtifact, "from_pretrained", refuse)
            with pytest.raises(ValueError, match="is not followed: pass artifact=") as raised:
                A2ATSCache.from_pretrained(tmp_path / "saved", llama.config)
        assert repr(options["artifact"]) in str(raised.value)
        named = A2ATSCache.from_pretrained(tmp_path / "saved", llama.config, artifact=artifact)
        # The revision of a repository went too.
        assert named.options == cache.options
    with pytest.raises(ValueError, match="artifact: not an option that a filled cache can change"):
        cache.fork(artifact=artifact.parent)


def test_a_saved_cache_takes_the_artifact_beside_the_model_if_it_is_the_same(
    llama: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, cache)
    cache.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(llama.config, "_name_or_path", str(tmp_path))
    beside = Path(shutil.copytree(artifact, tmp_path / "a2ats"))
    loaded = A2ATSCache.from_pretrained(tmp_path / "saved", llama.config)
    assert loaded.options.artifact == str(beside)
    assert loaded.get_seq_length() == cache.get_seq_length()
    _calibrate(llama, beside, seed=1)
    for named in ({}, {"artifact": beside}):
        with pytest.raises(ValueError, match="saved with another artifact than"):
            A2ATSCache.from_pretrained(tmp_path / "saved", llama.config, **named)


def _codes(cache: A2ATSCache) -> torch.Tensor:
    """``[layers, B, Hkv, n]``: those of all tokens that the cache holds."""
    length = cache.get_seq_length()
    rows = [layer.kv.index._codes.rows for layer in cache.retrieval_layers]
    return torch.stack([row[:, :, :length] for row in rows])


# Rows without RoPE in some layers, with learned positions, of YaRN.
@pytest.mark.parametrize("name", ["smollm3", "gpt2", "gpt_oss"])
def test_padding_and_positions_change_no_code(name: str, artifact_of: Callable[..., str]) -> None:
    model, place = attached(MODELS[name].build()), artifact_of("a2ats", name)
    alone, padded, moved = (A2ATSCache(model.config, artifact=place, **SMALL) for _ in range(3))
    ids, mask = ragged((60, 41))
    read(model, alone, ids[1:, 19:])
    read(model, padded, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    read(model, moved, ids[1:, 19:], position_ids=torch.arange(300, 341)[None])
    same = [_codes(padded)[:, 1:, :, 19:] == _codes(alone), _codes(moved) == _codes(alone)]
    # Of two codewords almost as near, rounding chooses.
    assert same[0].float().mean() > 0.99
    # GPT-2's positions are learned, and part of its keys.
    assert name == "gpt2" or same[1].float().mean() > 0.99


@pytest.mark.parametrize("method", SPACES)
def test_without_positions_nothing_is_taken_in(
    method: str,
    llama: PreTrainedModel,
    artifact_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after, way_out = SPACES[method]
    cls, spaces = registered_methods()[method], partial(artifact_of, method, "llama")
    cache = cls(llama.config, **SMALL, artifact=spaces(space=before))
    monkeypatch.setattr("hf_kvret.attention.attention._positions", lambda ids, query: None)
    with pytest.raises(ValueError, match=f"pass position_ids to the model, {way_out}"):
        read(llama, cache, prompt(1, 60))
    assert cache.get_seq_length() == 0
    others = [{"artifact": spaces(space=after)}, *[{"predictor": "none"}] * (method == "aqua")]
    for options in others:
        other = cls(llama.config, **SMALL, **options)
        assert torch.isfinite(read(llama, other, prompt(1, 60))).all()


@pytest.mark.parametrize("method", SPACES)
def test_images_need_keys_that_stay_rotated(method: str, artifact_of: Callable[..., str]) -> None:
    """Its attention is told positions that are not those of its RoPE, or none."""
    model, (before, after, _) = MODELS["qwen2_vl"].build(), SPACES[method]
    cls, spaces = registered_methods()[method], partial(artifact_of, method, "qwen2_vl")
    with pytest.raises(ValueError, match=rf"positions of three parts.*--space {after}"):
        cls(model.config, artifact=spaces(space=before))
    others = [{"artifact": spaces(space=after)}, *[{"predictor": "none"}] * (method == "aqua")]
    for options in others:
        cache = cls(model.config, **SMALL, **options)
        model.generate(prompt(1, 60), past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert cache.stats()["layers"][1]["selected"] > 0
    # The text decoder by itself knows no images.
    assert cls(model.config.get_text_config(), artifact=spaces(space=before)).options.artifact
