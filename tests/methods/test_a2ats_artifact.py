"""A2ATSCache and its artifact: found, checked, refused; the options; the name."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact, hub
from hf_kvret.lab.calibrate.a2ats import A2ATSCalibration
from hf_kvret.lab.calibrate.corpus import Corpus
from hf_kvret.lab.calibrate.runner import calibrate
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig, A2ATSIndex
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from ..saved.saved_files import read_saved, write_saved

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 6}
RUN: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def _calibrate(model: PreTrainedModel, folder: Path, seed: int = 0) -> CalibrationArtifact:
    options = A2ATSCalibration(codewords=16, distance=32, rounds=3, compare=False, seed=seed)
    corpus = Corpus([prompt(1, 120)[0]], 0, {"text": "random"})
    return calibrate(model, corpus, options, folder, progress=False)


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


@pytest.fixture
def model() -> PreTrainedModel:
    return MODELS["llama"].build()


def _fill(model: PreTrainedModel, cache: A2ATSCache) -> torch.Tensor:
    """The prompt and the answer."""
    return model.generate(prompt(1, 60), past_key_values=cache, **RUN)


def test_a_folder_may_be_a_path_or_its_name(model: PreTrainedModel, artifact: Path) -> None:
    by_path = A2ATSCache(config=model.config, artifact=artifact, **SMALL)
    by_name = A2ATSCache(model.config, A2ATSConfig(artifact=str(artifact)), **SMALL)
    assert by_path.options == by_name.options
    _fill(model, by_path)
    assert by_path.stats()["layers"][1]["codewords"] == 16


def test_generate_takes_it_by_name(model: PreTrainedModel, artifact: Path) -> None:
    options = {**COVERING_OPTIONS, "artifact": str(artifact)}
    expected = model.generate(prompt(1, 60), **RUN)
    result = model.generate(
        prompt(1, 60),
        cache_implementation="a2ats",
        cache_config=options,
        return_dict_in_generate=True,
        **RUN,
    )
    assert type(result.past_key_values) is A2ATSCache
    assert torch.equal(result.sequences, expected)
    with pytest.raises(ValueError, match="hf-kvret calibrate a2ats --model MODEL"):
        model.generate(prompt(1, 60), cache_implementation="a2ats", **RUN)


def test_an_artifact_in_the_models_folder_is_found(tmp_path: Path, model: PreTrainedModel) -> None:
    home = tmp_path / "model"
    model.save_pretrained(home)
    loaded = AutoModelForCausalLM.from_pretrained(home)
    with pytest.raises(ValueError, match=rf"artifact='folder-or-hub-id'.*--model {home} "):
        A2ATSCache(loaded.config)
    _calibrate(model, home / "a2ats")
    assert A2ATSCache(loaded.config).options.artifact == str(home / "a2ats")
    result = loaded.generate(
        prompt(1, 60), cache_implementation="a2ats", return_dict_in_generate=True, **RUN
    )
    assert type(result.past_key_values) is A2ATSCache


def test_another_architecture_is_refused_when_the_cache_is_made(artifact: Path) -> None:
    with pytest.raises(ValueError, match="made for a llama model, this one is qwen2"):
        A2ATSCache(MODELS["qwen2"].config(), artifact=artifact)
    config = MODELS["llama"].config()
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"rope_theta=10000.0, this model has 500000.0"):
        A2ATSCache(config, artifact=artifact)


def test_other_weights_are_refused_by_generate_and_can_be_checked_by_hand(
    model: PreTrainedModel, artifact: Path
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    cache = A2ATSCache(model.config, artifact=artifact, **SMALL)
    with pytest.raises(ValueError, match="was made from other weights"):
        _fill(model, cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="was made from other weights"):
        cache.check_model(model)


def test_what_is_no_artifact_is_refused_when_the_cache_is_made(
    model: PreTrainedModel, artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        A2ATSCache(model.config, artifact=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        A2ATSCache(model.config, artifact=tmp_path / "empty")
    other = CalibrationArtifact.from_pretrained(artifact)
    dataclasses.replace(other, method="paris").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"artifact of 'paris', not of 'a2ats'"):
        A2ATSCache(model.config, artifact=tmp_path / "other")
    (tensors,) = artifact.glob("artifact-*.safetensors")
    os.truncate(tensors, 1000)
    with pytest.raises(ValueError, match=r"artifact-\w+\.safetensors is damaged"):
        A2ATSCache(model.config, artifact=artifact)


def test_a_revision_goes_to_the_hub_and_is_refused_for_folders(
    model: PreTrainedModel, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="only artifacts on the hub have revisions"):
        A2ATSCache(model.config, artifact=artifact, revision="v1")
    requests = []
    local = CalibrationArtifact.from_pretrained

    def from_hub(name: str, **how: Any) -> CalibrationArtifact:
        requests.append((name, how))
        return local(artifact)

    monkeypatch.setattr(CalibrationArtifact, "from_pretrained", from_hub)
    cache = A2ATSCache(model.config, artifact="someone/codebooks", revision="v1", **SMALL)
    _fill(model, cache)
    # Read once, for all layers, checks and caches.
    A2ATSCache(model.config, cache.options)
    assert requests == [("someone/codebooks", {"method": "a2ats", "revision": "v1"})]
    A2ATSCache(model.config, artifact="someone/codebooks", revision="v2")
    assert requests[1:] == [("someone/codebooks", {"method": "a2ats", "revision": "v2"})]


def test_a_folder_that_was_written_anew_is_read_anew(
    model: PreTrainedModel, artifact: Path, tmp_path: Path
) -> None:
    old = A2ATSCache(model.config, artifact=artifact, **SMALL)
    _fill(model, old)
    old.save_pretrained(tmp_path / "saved")
    before = old.retrieval_layers[0].kv.index._quantizer
    _calibrate(model, artifact, seed=1)
    new = A2ATSCache(model.config, artifact=artifact, **SMALL)
    _fill(model, new)
    after = new.retrieval_layers[0].kv.index._quantizer
    assert not torch.equal(after.words, before.words)
    assert old.retrieval_layers[0].kv.index._quantizer is before
    with pytest.raises(ValueError, match="saved with another artifact than"):
        A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=artifact)


def test_a_saved_cache_asks_for_its_artifact(
    model: PreTrainedModel, artifact: Path, tmp_path: Path
) -> None:
    cache = A2ATSCache(model.config, artifact=artifact, **SMALL)
    _fill(model, cache)
    cache.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "cache.json").read_text())
    assert saved["options"]["artifact"] == str(artifact)
    moved = artifact.rename(tmp_path / "moved")
    asks = (
        rf"saved with artifact='{artifact}', and what a file names is not followed: pass artifact="
    )
    with pytest.raises(ValueError, match=asks):
        A2ATSCache.from_pretrained(tmp_path / "saved", model.config)
    loaded = A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=moved)
    assert loaded.options.artifact == str(moved)
    with pytest.raises(ValueError, match="artifact: not an option that a filled cache can change"):
        cache.fork(artifact=moved)
    _calibrate(model, tmp_path / "another", seed=1)
    with pytest.raises(ValueError, match="saved with another artifact than"):
        A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=tmp_path / "another")


def test_the_published_options() -> None:
    default, paper = A2ATSConfig(), A2ATSConfig.preset("paper", artifact="a", sink=8)
    assert (default.budget_of, default.top_k, default.sink, default.recent) == ("head", 0.06, 4, 64)
    # 3% of 10,000 tokens for each of the four query heads of Llama-3.1-8B.
    assert (paper.budget_of, paper.budget(10_000) // 4, paper.recent) == ("union", 300, 64)
    assert (paper.artifact, paper.sink) == ("a", 8)
    assert A2ATSConfig.preset("paper", top_k=0.06).top_k == 0.06


def test_an_index_without_an_artifact_says_how_to_name_one() -> None:
    keys = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"A2ATSConfig\(artifact="):
        A2ATSIndex(A2ATSConfig(), 0).on_forward(keys, keys, 0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, o: x.update({"layers.1.codewords": x["layers.1.codewords"][:1]}),
            r"layers\.1\.metric \[2, 16, 16\], not \[1, 16, 16\]",
        ),
        (lambda x, o: x.pop("layers.1.inv_freq"), r"no layers\.1\.inv_freq: make it again"),
        (lambda x, o: o.update(window="2048"), r"has a wrong option \(distance must be an int"),
        (
            lambda x, o: o.update(space="polar"),
            r"space='polar': choose 'windowed' or 'rotated'; upgrade hf-kvret where",
        ),
    ],
)
def test_an_artifact_of_other_tensors_or_options_is_refused_before_the_first_token(
    change: Callable[[Any, Any], object], message: str, model: PreTrainedModel, artifact: Path
) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact)
    tensors, options = dict(whole.tensors), dict(whole.options)
    change(tensors, options)
    dataclasses.replace(whole, tensors=tensors, options=options).save_pretrained(artifact)
    with pytest.raises(ValueError, match=f"{message}.*hf-kvret calibrate a2ats"):
        A2ATSCache(model.config, artifact=artifact)


def test_a_relative_path_means_the_folder_that_it_meant_first(
    model: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact.parent)
    cache = A2ATSCache(model.config, artifact=artifact.name, **SMALL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _fill(model, cache)
    cache.reset()
    ids = torch.cat([_fill(model, cache), prompt(1, 20)], dim=1)
    # The same options beside the cache are no contradiction, in whatever form.
    monkeypatch.chdir(artifact.parent)
    options = {"artifact": artifact.name}
    model.generate(ids, past_key_values=cache.fork(), cache_config=options, **RUN)


def test_a_revision_without_an_artifact_is_refused() -> None:
    with pytest.raises(ValueError, match="revision='v1' without artifact: name the artifact's hub"):
        A2ATSConfig(revision="v1")


def test_a_saved_cache_moves_from_the_hub_to_a_folder(
    model: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = CalibrationArtifact.from_pretrained
    with monkeypatch.context() as patch:
        patch.setattr(CalibrationArtifact, "from_pretrained", lambda name, **how: local(artifact))
        cache = A2ATSCache(model.config, artifact="me/moving", revision="v1", **SMALL)
        _fill(model, cache)
        cache.save_pretrained(tmp_path / "saved")
    loaded = A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=artifact)
    assert loaded.options.revision is None and loaded.get_seq_length() == cache.get_seq_length()


def test_an_artifact_that_a_saved_cache_names_is_not_followed(
    model: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder that is there, nor a repository of the hub, with whatever revision."""
    cache = A2ATSCache(model.config, artifact=artifact, **SMALL)
    _fill(model, cache)
    cache.save_pretrained(tmp_path / "saved")
    description, _ = read_saved(tmp_path / "saved")
    refuse = Mock(side_effect=AssertionError("it was followed"))
    for changes in (
        {},
        {"artifact": str(artifact.parent)},
        {"artifact": "stranger/evil", "revision": "v1"},
        {"artifact": "~/evil", "artifact_sha256": "0" * 64},
    ):
        options = description["options"] | changes
        write_saved(tmp_path / "saved", {**description, "options": options})
        with monkeypatch.context() as patch:
            patch.setattr(hub, "snapshot_download", refuse)
            patch.setattr(CalibrationArtifact, "from_pretrained", refuse)
            with pytest.raises(ValueError, match="is not followed: pass artifact=") as raised:
                A2ATSCache.from_pretrained(tmp_path / "saved", model.config)
        assert repr(options["artifact"]) in str(raised.value)
        if "artifact_sha256" in changes:
            with pytest.raises(ValueError, match="and artifact_sha256 asks for 0000"):
                A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=artifact)
        else:
            named = A2ATSCache.from_pretrained(tmp_path / "saved", model.config, artifact=artifact)
            assert named.options == cache.options


def test_a_saved_cache_takes_the_artifact_beside_the_model(
    model: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the one that the cache was saved with."""
    cache = A2ATSCache(model.config, artifact=artifact, **SMALL)
    _fill(model, cache)
    cache.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    shutil.copytree(artifact, tmp_path / "a2ats")
    loaded = A2ATSCache.from_pretrained(tmp_path / "saved", model.config)
    assert loaded.options.artifact == str(tmp_path / "a2ats")
    assert loaded.get_seq_length() == cache.get_seq_length()
    _calibrate(model, tmp_path / "a2ats", seed=1)
    message = "saved with another artifact than.*is not followed: pass artifact="
    with pytest.raises(ValueError, match=message):
        A2ATSCache.from_pretrained(tmp_path / "saved", model.config)


def test_what_no_cache_uses_any_more_is_let_go(
    model: PreTrainedModel, made: Path, tmp_path: Path
) -> None:
    folders = [Path(shutil.copytree(made, tmp_path / str(number))) for number in range(6)]
    held = []
    for folder in folders:
        cache = A2ATSCache(model.config, artifact=folder, **SMALL)
        _fill(model, cache)
        held.append(weakref.ref(cache.retrieval_layers[0].kv.index._quantizer))
    first = A2ATSCache(model.config, artifact=folders[-1], **SMALL)
    _fill(model, first)
    assert first.retrieval_layers[0].kv.index._quantizer is held[-1]()
    del cache, first
    gc.collect()
    assert [one() is None for one in held] == [True, True, False, False, False, False]
