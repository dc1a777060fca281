"""A2ATSCache and its artifact: found, checked, refused; the options; the name."""

from __future__ import annotations

import dataclasses
import gc
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


def _fill(model: PreTrainedModel, cache: A2ATSCache) -> torch.Tensor:
    """The prompt and the answer."""
    return model.generate(prompt(1, 60), past_key_values=cache, **RUN)


def test_a_folder_may_be_a_path_or_its_name(llama: PreTrainedModel, artifact: Path) -> None:
    by_path = A2ATSCache(config=llama.config, artifact=artifact, **SMALL)
    by_name = A2ATSCache(llama.config, A2ATSConfig(artifact=str(artifact)), **SMALL)
    assert by_path.options == by_name.options
    _fill(llama, by_path)
    assert by_path.stats()["layers"][1]["codewords"] == 16


def test_generate_takes_it_by_name(llama: PreTrainedModel, artifact: Path) -> None:
    options = {**COVERING_OPTIONS, "artifact": str(artifact)}
    expected = llama.generate(prompt(1, 60), **RUN)
    result = llama.generate(
        prompt(1, 60),
        cache_implementation="a2ats",
        cache_config=options,
        return_dict_in_generate=True,
        **RUN,
    )
    assert type(result.past_key_values) is A2ATSCache
    assert torch.equal(result.sequences, expected)
    with pytest.raises(ValueError, match="hf-kvret calibrate a2ats --model MODEL"):
        llama.generate(prompt(1, 60), cache_implementation="a2ats", **RUN)


def test_an_artifact_in_the_models_folder_is_found(tmp_path: Path, llama: PreTrainedModel) -> None:
    home = tmp_path / "model"
    llama.save_pretrained(home)
    loaded = AutoModelForCausalLM.from_pretrained(home)
    with pytest.raises(ValueError, match=rf"artifact='folder-or-hub-id'.*--model {home} "):
        A2ATSCache(loaded.config)
    _calibrate(llama, home / "a2ats")
    assert A2ATSCache(loaded.config).options.artifact == str(home / "a2ats")
    result = loaded.generate(
        prompt(1, 60), cache_implementation="a2ats", return_dict_in_generate=True, **RUN
    )
    assert type(result.past_key_values) is A2ATSCache


def _nothing(artifact: Path) -> None:
    """The artifact as it is."""


def _empty(artifact: Path) -> None:
    shutil.rmtree(artifact)
    artifact.mkdir()


def _of_paris(artifact: Path) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact)
    _empty(artifact)
    dataclasses.replace(whole, method="paris").save_pretrained(artifact)


def _truncated(artifact: Path) -> None:
    (tensors,) = artifact.glob("artifact-*.safetensors")
    os.truncate(tensors, 1000)


@pytest.mark.parametrize(
    ("change", "name", "options", "error", "message"),
    [
        (shutil.rmtree, "llama", {}, FileNotFoundError, "no folder"),
        (_empty, "llama", {}, FileNotFoundError, r"config\.json is missing"),
        (_of_paris, "llama", {}, ValueError, "artifact of 'paris', not of 'a2ats'"),
        (_truncated, "llama", {}, ValueError, r"artifact-\w+\.safetensors is damaged"),
        (_nothing, "qwen2", {}, ValueError, "made for a llama model, this one is qwen2"),
        (_nothing, "llama", {"revision": "v1"}, ValueError, "only artifacts on the hub have rev"),
        (_nothing, "llama", {"artifact": None, "revision": "v1"}, ValueError, "without artifact: "),
    ],
)
def test_what_is_no_artifact_of_the_model_is_refused_when_the_cache_is_made(
    change: Callable[[Path], object],
    name: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    artifact: Path,
) -> None:
    change(artifact)
    with pytest.raises(error, match=message):
        A2ATSCache(MODELS[name].config(), **{"artifact": artifact, **options})


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


def test_an_artifact_of_the_hub_is_read_once_for_each_revision(
    llama: PreTrainedModel, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []
    local = CalibrationArtifact.from_pretrained

    def from_hub(name: str, **how: Any) -> CalibrationArtifact:
        requests.append((name, how))
        return local(artifact)

    monkeypatch.setattr(CalibrationArtifact, "from_pretrained", from_hub)
    cache = A2ATSCache(llama.config, artifact="someone/codebooks", revision="v1", **SMALL)
    _fill(llama, cache)
    # Read once, for all layers, checks and caches.
    A2ATSCache(llama.config, cache.options)
    assert requests == [("someone/codebooks", {"method": "a2ats", "revision": "v1"})]
    A2ATSCache(llama.config, artifact="someone/codebooks", revision="v2")
    assert requests[1:] == [("someone/codebooks", {"method": "a2ats", "revision": "v2"})]


def test_a_folder_that_was_written_anew_is_read_anew(
    llama: PreTrainedModel, artifact: Path
) -> None:
    old = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, old)
    before = old.retrieval_layers[0].kv.index._quantizer
    _calibrate(llama, artifact, seed=1)
    new = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, new)
    after = new.retrieval_layers[0].kv.index._quantizer
    assert not torch.equal(after.words, before.words)
    assert old.retrieval_layers[0].kv.index._quantizer is before


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
            r"layers\.1\.metric \[2, 16, 16\] in torch.float32, not \[1, 16, 16\]",
        ),
        (lambda x, o: x.pop("layers.1.inv_freq"), r"no layers\.1\.inv_freq: make it again"),
        (lambda x, o: o.update(window="2048"), r"wrong option \(distance must be .*, got '2048'"),
        (
            lambda x, o: o.update(space="polar"),
            r"space='polar': choose 'windowed' or 'rotated'; upgrade hf-kvret where",
        ),
    ],
)
def test_an_artifact_of_other_tensors_or_options_is_refused_before_the_first_token(
    change: Callable[[Any, Any], object], message: str, llama: PreTrainedModel, artifact: Path
) -> None:
    whole = CalibrationArtifact.from_pretrained(artifact)
    tensors, options = dict(whole.tensors), dict(whole.options)
    change(tensors, options)
    dataclasses.replace(whole, tensors=tensors, options=options).save_pretrained(artifact)
    with pytest.raises(ValueError, match=f"{message}.*hf-kvret calibrate a2ats"):
        A2ATSCache(llama.config, artifact=artifact)


def test_a_relative_path_means_the_folder_that_it_meant_first(
    llama: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact.parent)
    cache = A2ATSCache(llama.config, artifact=artifact.name, **SMALL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _fill(llama, cache)
    cache.reset()
    ids = torch.cat([_fill(llama, cache), prompt(1, 20)], dim=1)
    # The same options beside the cache are no contradiction, in whatever form.
    monkeypatch.chdir(artifact.parent)
    options = {"artifact": artifact.name}
    llama.generate(ids, past_key_values=cache.fork(), cache_config=options, **RUN)


def test_an_artifact_that_a_saved_cache_names_is_not_followed(
    llama: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder that is there, nor a repository of the hub, with whatever revision."""
    cache = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, cache)
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
                A2ATSCache.from_pretrained(tmp_path / "saved", llama.config)
        assert repr(options["artifact"]) in str(raised.value)
        if "artifact_sha256" in changes:
            with pytest.raises(ValueError, match="and artifact_sha256 asks for 0000"):
                A2ATSCache.from_pretrained(tmp_path / "saved", llama.config, artifact=artifact)
            continue
        named = A2ATSCache.from_pretrained(tmp_path / "saved", llama.config, artifact=artifact)
        # The revision of a repository went too.
        assert named.options == cache.options
    with pytest.raises(ValueError, match="artifact: not an option that a filled cache can change"):
        cache.fork(artifact=artifact.parent)


def test_a_saved_cache_takes_the_artifact_beside_the_model(
    llama: PreTrainedModel, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the one that the cache was saved with."""
    cache = A2ATSCache(llama.config, artifact=artifact, **SMALL)
    _fill(llama, cache)
    cache.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(llama.config, "_name_or_path", str(tmp_path))
    shutil.copytree(artifact, tmp_path / "a2ats")
    loaded = A2ATSCache.from_pretrained(tmp_path / "saved", llama.config)
    assert loaded.options.artifact == str(tmp_path / "a2ats")
    assert loaded.get_seq_length() == cache.get_seq_length()
    _calibrate(llama, tmp_path / "a2ats", seed=1)
    message = "saved with another artifact than.*is not followed: pass artifact="
    with pytest.raises(ValueError, match=message):
        A2ATSCache.from_pretrained(tmp_path / "saved", llama.config)
    with pytest.raises(ValueError, match="saved with another artifact than"):
        A2ATSCache.from_pretrained(tmp_path / "saved", llama.config, artifact=tmp_path / "a2ats")


def test_what_no_cache_uses_any_more_is_let_go(
    llama: PreTrainedModel, made: Path, tmp_path: Path
) -> None:
    folders = [Path(shutil.copytree(made, tmp_path / str(number))) for number in range(6)]
    held = []
    for folder in folders:
        cache = A2ATSCache(llama.config, artifact=folder, **SMALL)
        _fill(llama, cache)
        held.append(weakref.ref(cache.retrieval_layers[0].kv.index._quantizer))
    first = A2ATSCache(llama.config, artifact=folders[-1], **SMALL)
    _fill(llama, first)
    assert first.retrieval_layers[0].kv.index._quantizer is held[-1]()
    del cache, first
    gc.collect()
    assert [one() is None for one in held] == [True, True, False, False, False, False]
