"""The artifacts beside the bundled models: theirs, whole, and as good as their cards say."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import hf_kvret
from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL, REFERENCE_MODEL

HOMES = pytest.mark.parametrize("home", [BUNDLED_MODEL, REFERENCE_MODEL], ids=lambda p: p.name)


@HOMES
@pytest.mark.parametrize("method", ["a2ats", "aqua"])
def test_an_artifact_is_of_the_model_that_it_lies_in(home: Path, method: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(home)
    artifact = CalibrationArtifact.from_pretrained(home / method, method=method)
    artifact.check(model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artifact.check_weights(model).compared > 10
    cache = hf_kvret.registered_methods()[method](model.config)
    assert cache.options.artifact == str(home / method)
    assert [row["layer"] for row in artifact.quality] == list(range(len(cache.layers)))
    # What is shared tells nothing of the machine that made it.
    assert not any("/" in str(value) for value in artifact.data.values())


@HOMES
def test_queries_make_better_codewords_in_every_layer(home: Path) -> None:
    """A2ATS, figure 3, on held-out text."""
    artifact = CalibrationArtifact.from_pretrained(home / "a2ats")
    errors = [(row["score_error"], row["plain_score_error"]) for row in artifact.quality]
    assert all(0 < aware < plain < 0.3 for aware, plain in errors), errors


@HOMES
def test_predictors_leave_less_to_code(home: Path) -> None:
    """AQUA-KV, figure 2, on held-out text; nothing predicts the first layer."""
    artifact = CalibrationArtifact.from_pretrained(home / "aqua")
    first, *others = artifact.quality
    assert first["role"] == "anchor"
    for row in others:
        assert row["key_explained"] > 0.2 and row["value_explained"] > 0.8
        assert row["key_error"] < 0.5 * row["key_error_unpredicted"]
