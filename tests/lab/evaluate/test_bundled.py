"""The bundled models: small, with cards and artifacts; a script that repeats its training."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_kvret
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate import bundled
from hf_kvret.lab.evaluate.bundled import (
    BUNDLED_MODEL,
    REFERENCE_MODEL,
    example_model,
    load_bundled_model,
)

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "train_needle_model.py"


def test_the_bundled_model_is_small_has_a_card_and_is_ready() -> None:
    weights = BUNDLED_MODEL / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    card = (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n") and "## Training" in card
    model = load_bundled_model(torch.float16)
    assert not model.training and model.dtype == torch.float16


def test_a_missing_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert example_model("reference") == bundled.REFERENCE_MODEL
    for name in ("needle", "reference"):
        monkeypatch.setitem(bundled.OUR_MODELS, name, tmp_path)
    with pytest.raises(FileNotFoundError, match="install hf_kvret again"):
        load_bundled_model()
    with pytest.raises(FileNotFoundError, match="run this in the folder of a checkout"):
        example_model("reference")
    with pytest.raises(ValueError, match="no model 'needles': choose one of needle, "):
        example_model("needles")


@pytest.mark.slow
def test_training_twice_gives_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tokens", "4e3", "--eval", "--out"]
    trained = []
    for name, seed in (("first", "0"), ("second", "0"), ("other", "1")):
        subprocess.run([*command, str(tmp_path / name), "--seed", seed], check=True)
        trained.append(load_file(tmp_path / name / "model.safetensors"))
    first, second, other = trained
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


HOMES = pytest.mark.parametrize("home", [BUNDLED_MODEL, REFERENCE_MODEL], ids=lambda p: p.name)


@HOMES
@pytest.mark.parametrize("method", ["a2ats", "aqua"])
def test_an_artifact_is_of_the_model_that_it_lies_in(home: Path, method: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(home)
    artifact = CalibrationArtifact.from_pretrained(home / method, method=method)
    artifact.check(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifact.check_weights(model) > 10
    cache = hf_kvret.registered_methods()[method](model.config)
    assert cache.options.artifact == str(home / method)
    assert [row["layer"] for row in artifact.quality] == list(range(len(cache.layers)))
    # A shared artifact tells nothing of the machine that made it.
    assert not any("/" in str(value) for value in artifact.data.values())


@HOMES
def test_artifacts_are_good_on_held_out_text(home: Path) -> None:
    """A2ATS, figure 3; AQUA-KV, figure 2, where nothing predicts the first layer."""
    codebooks = CalibrationArtifact.from_pretrained(home / "a2ats")
    errors = [(row["score_error"], row["plain_score_error"]) for row in codebooks.quality]
    assert all(0 < aware < plain < 0.3 for aware, plain in errors), errors
    first, *others = CalibrationArtifact.from_pretrained(home / "aqua").quality
    assert first["role"] == "anchor"
    for row in others:
        assert row["key_explained"] > 0.2 and row["value_explained"] > 0.8
        assert row["key_error"] < 0.5 * row["key_error_unpredicted"]
