"""Factors of what is left out: what is learned, who may use it, what it is good for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.calibration import CalibrationArtifact, hub
from hf_kvret.calibration.corpus import Corpus
from hf_kvret.calibration.rest import RestCalibration, _studied
from hf_kvret.calibration.runner import calibrate
from hf_kvret.cli import main
from hf_kvret.evaluation.caches import choose_cache
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.task import artifact_sha256, check_artifacts
from hf_kvret.testing.saved import read_saved, write_saved
from hf_kvret.testing.tiny import spread_weights

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
SIZES: dict[str, Any] = {"recent": 16, "flush": 16, "sink": 2, "top_k": 0.05, "dense_below": 0}
SPEC = "flat:recent=16:flush=16:sink=2:top_k=0.05"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = LlamaForCausalLM(CONFIG).eval()
    spread_weights(made, seed=3)
    hf_kvret.attach(made)
    return made


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (320,), generator=generator) for _ in range(3)]


@pytest.fixture(scope="module")
def folder(
    model: PreTrainedModel, texts: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> str:
    folder = tmp_path_factory.mktemp("rest")
    calibrate(model, Corpus(texts, 1, {}), RestCalibration(SPEC), folder, progress=False)
    return str(folder)


def error(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> float:
    """Mean squared error of the logits behind three quarters of a text."""
    cache = FlatKVCache(CONFIG, **{**SIZES, **options})
    start = len(ids) * 3 // 4
    with torch.no_grad():
        model(ids[None, :start], past_key_values=cache)
        pieces = [
            model(piece[None], past_key_values=cache).logits[0] for piece in ids[start:].split(16)
        ]
        exact = model(ids[None], use_cache=False).logits[0, start:]
    return float((torch.cat(pieces) - exact).square().mean())


def test_factors_bring_attention_closer_to_full_attention(
    model: PreTrainedModel, texts: list[torch.Tensor], folder: str
) -> None:
    learned = [
        sum(error(model, ids, **options) for ids in texts[:2])
        for options in ({}, {"rest": "index"}, {"rest": "index", "rest_artifact": folder})
    ]
    assert learned[2] < learned[1] < learned[0]
    artifact = CalibrationArtifact.from_pretrained(folder, method="rest")
    for row in artifact.quality:
        # The oracle's weights are the true ones.
        assert abs(row["log_ratio"]) < 1e-4
        assert row["estimated"] < row["alone"] and row["corrected"] < row["alone"]
    assert artifact.options["cache"] == "flat" and artifact.options["top_k"] == 0.05
    assert {tuple(x.shape) for x in artifact.tensors.values()} == {(4,)}
    card = (Path(folder) / "README.md").read_text()
    assert 'cache_implementation="flat"' in card and '"rest": "index"' in card


def test_forks_and_loads_take_them_up(model: PreTrainedModel, folder: str, tmp_path: Path) -> None:
    ids = torch.arange(200)[None] % 50 + 5
    cache = FlatKVCache(CONFIG, **SIZES)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save_pretrained(tmp_path)
        options = {"rest": "index", "rest_artifact": folder}
        caches = [cache.fork(**options), FlatKVCache.from_pretrained(tmp_path, CONFIG, **options)]
        plain = cache.fork(rest="index")
        logits = [
            model(ids[:, :3], past_key_values=one).logits for one in (*caches, caches[0].fork())
        ]
        without = model(ids[:, :3], past_key_values=plain).logits
        assert torch.equal(logits[0], logits[1])
        assert not torch.equal(logits[0], without)
    assert all(one.options.rest_artifact == folder for one in caches)


def test_factors_that_a_saved_cache_names_are_not_followed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FlatKVCache(CONFIG, **SIZES).save_pretrained(tmp_path)
    description, _ = read_saved(tmp_path)
    for name in (folder, "stranger/evil"):
        options = description["options"] | {"rest": "index", "rest_artifact": name}
        write_saved(tmp_path, {**description, "options": options})
        with monkeypatch.context() as patch:
            refuse = Mock(side_effect=AssertionError("it was followed"))
            patch.setattr(hub, "snapshot_download", refuse)
            patch.setattr(CalibrationArtifact, "from_pretrained", refuse)
            asks = (
                rf"rest_artifact='{name}'.*is not followed: pass rest_artifact=.*or rest_artifact=N"
            )
            with pytest.raises(ValueError, match=asks):
                FlatKVCache.from_pretrained(tmp_path, CONFIG)
            for changes in ({"rest_artifact": None}, {"rest": "mean"}, {"rest": None}):
                loaded = FlatKVCache.from_pretrained(tmp_path, CONFIG, **changes)
                assert loaded.options.rest_artifact is None
                assert loaded.options.rest == changes.get("rest", "index")
        loaded = FlatKVCache.from_pretrained(tmp_path, CONFIG, rest_artifact=folder)
        assert loaded.options.rest_artifact == folder


def test_artifacts_of_others_are_refused(folder: str) -> None:
    options = {"rest": "index", "rest_artifact": folder}
    with pytest.raises(ValueError, match=r"made for 'flat'.*calibrate rest --cache paris"):
        ParisKVCache(CONFIG, **options)
    other = LlamaConfig(**{**CONFIG.to_dict(), "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="KV heads"):
        FlatKVCache(other, **options)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        FlatKVCache(CONFIG, rest="index", rest_artifact="./nowhere")


def test_a_pinned_artifact_is_that_one_or_refused(folder: str) -> None:
    options = {**SIZES, "rest": "index", "rest_artifact": folder}
    digest = CalibrationArtifact.from_pretrained(folder).sha256
    pinned = FlatKVCache(CONFIG, **options, rest_artifact_sha256=digest)
    assert pinned.options.rest_artifact_sha256 == digest
    other = digest[::-1]
    with pytest.raises(
        ValueError, match=f"has sha256 {digest}, and rest_artifact_sha256 asks for {other}"
    ):
        FlatKVCache(CONFIG, **options, rest_artifact_sha256=other)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        FlatKVCache(CONFIG, **options, rest_artifact_sha256="abc")
    for fork in (pinned.fork(rest=None, rest_artifact=None), pinned.fork(rest_artifact=folder)):
        assert (fork.options.rest_artifact_sha256 is None) == (fork.options.rest is None)
    with pytest.raises(TypeError, match="rest_artifact_sha256 must be a text"):
        FlatKVCache(CONFIG, **options, rest_artifact_sha256=1)
    with pytest.raises(ValueError, match="rest_revision='v1' without rest_artifact"):
        FlatKVCache(CONFIG, rest_revision="v1")
    with pytest.raises(ValueError, match="without rest_artifact: name its folder"):
        FlatKVCache(CONFIG, rest_artifact_sha256=digest)


def test_other_weights_are_refused_by_generate(folder: str) -> None:
    other = LlamaForCausalLM(CONFIG).eval()
    cache = FlatKVCache(CONFIG, **SIZES, rest="index", rest_artifact=folder)
    with pytest.raises(ValueError, match="other weights"):
        other.generate(torch.ones(1, 4, dtype=torch.long), past_key_values=cache, max_new_tokens=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("full", "it retrieves nothing"),
        ("ctkvr", "rest='index': ctkvr"),
        ("flat:recent=16:top_k=1.0", "left anything out"),
        ("flat", "recent=256 leaves nothing cold"),
    ],
)
def test_what_can_not_be_learned_is_said(
    spec: str, message: str, model: PreTrainedModel, texts: list[torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        corpus = Corpus([texts[0][:200]], 0, {})
        calibrate(model, corpus, RestCalibration(spec), tmp_path, progress=False)


def test_the_command_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--model", "needle", "--out", str(tmp_path / "out")]
    sizes = ["--tokens", "600", "--length", "300", "--held-out", "0.5"]
    assert main(["calibrate", "rest", *where, *sizes, "--cache", SPEC]) == 0
    assert "cache flat" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "corrected" in capsys.readouterr().out


def test_factors_are_verified_and_wrong_ones_refused(
    model: PreTrainedModel, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--verify", folder]) == 0
    assert "artifact rest of " in capsys.readouterr().out
    whole = CalibrationArtifact.from_pretrained(folder)
    name = "layers.1.log_factors"
    for spoilt, words in (
        (whole.tensors[name] + float("nan"), "NaN or infinity"),
        (whole.tensors[name] + 50, r"factors of layer 1 beyond exp\(6\)"),
        (whole.tensors[name].half(), "in float16, not in float32"),
        (whole.tensors[name][:-1], r"\(3,\), not \[4\]"),
    ):
        tensors = {**whole.tensors, name: spoilt.contiguous()}
        dataclasses.replace(whole, tensors=tensors).save_pretrained(tmp_path)
        assert main(["inspect", "--verify", str(tmp_path)]) == 2
        with pytest.raises(ValueError, match=words):
            FlatKVCache(CONFIG, rest="index", rest_artifact=str(tmp_path), **SIZES)


def test_names_of_the_command_line_stay_names_and_no_place_is_published() -> None:
    pin = "12" * 32
    spec = (
        f"flat:top_k=0.05:rest=index:rest_artifact=7:rest_revision=123:rest_artifact_sha256={pin}"
    )
    choice = choose_cache(spec)
    assert choice.options is not None
    assert (choice.options.rest_artifact, choice.options.rest_revision) == ("7", "123")
    options = RestCalibration(spec).options()
    assert options["named"] == "top_k=0.05:rest=index"
    # A calibration goes by the cache without the factors that it had.
    assert _studied(choice.options).rest_artifact_sha256 is None


def test_finished_cells_know_their_factors(
    model: PreTrainedModel, folder: str, tmp_path: Path
) -> None:
    subject = Subject("tiny", model, None)
    choice = choose_cache(f"flat:rest=index:rest_artifact={folder}")
    digest = artifact_sha256(choice, subject)
    assert digest is not None and artifact_sha256(choose_cache("flat"), subject) is None
    results = Results("eval ppl", {}, tmp_path / "r.json")
    results.add({"cache": choice.name}, {"loss": 1.0, "artifact": "0" * 64})
    with pytest.raises(ValueError, match=f"sha256 000000000000, now {digest[:12]}"):
        check_artifacts(results, {choice.name: digest})
