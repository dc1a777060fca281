"""An artifact holds what it was given, refuses what it can't save, and knows its model."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret.artifacts import CalibrationArtifact, ModelIdentity

TENSORS = {"x": torch.ones(3)}


def test_plain_parts_are_as_json_gives_them_back(identity: ModelIdentity) -> None:
    options: dict[str, Any] = {"ranks": (1, 2), "by layer": {3: "three"}}
    artifact = CalibrationArtifact("a2ats", identity, TENSORS, options=options)
    assert artifact.options == {"ranks": [1, 2], "by layer": {"3": "three"}}
    options["ranks"] = ()
    assert artifact.options["ranks"] == [1, 2]
    assert artifact.data == {} and artifact.quality == []
    assert artifact.nbytes == 12
    with pytest.raises(dataclasses.FrozenInstanceError):
        artifact.method = "aqua"  # type: ignore[misc]


@pytest.mark.parametrize("method", ["", "A2ATS", "a b", "../up", None])
def test_a_method_needs_a_plain_name(identity: ModelIdentity, method: Any) -> None:
    with pytest.raises(ValueError, match=r"method=.*small letters"):
        CalibrationArtifact(method, identity, TENSORS)


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        ({"tensors": {}}, ValueError, "at least one tensor"),
        ({"tensors": {"x": [1.0]}}, TypeError, "x is a list"),
        ({"tensors": {"__metadata__": torch.ones(1)}}, ValueError, "'__metadata__' is no name"),
        ({"tensors": {3: torch.ones(1)}}, ValueError, "3 is no name"),
        ({"data": ["texts"]}, TypeError, "data is a list"),
        ({"data": {"x": torch.ones(1)}}, TypeError, "data is not plain JSON"),
        ({"options": {"x": math.nan}}, ValueError, "options is not plain JSON"),
        ({"quality": [{"layer": 0, "error": math.inf}]}, ValueError, "quality is not plain"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    identity: ModelIdentity, parts: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        CalibrationArtifact(**{"method": "a2ats", "model": identity, "tensors": TENSORS, **parts})


def test_its_own_model_passes(artifact: CalibrationArtifact, llama: PreTrainedModel) -> None:
    artifact.check(llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = artifact.check_weights(llama)
    assert report.compared == len(artifact.model.weights) > 10
    assert report.differing == () and report.skipped == {}


def test_another_model_is_refused(artifact: CalibrationArtifact, llama: PreTrainedModel) -> None:
    config = copy.deepcopy(llama.config)
    config.num_key_value_heads = 4
    words = r"of meta/tiny-llama was made for 2 KV heads, this model has 4: .*calibrate a2ats"
    with pytest.raises(ValueError, match=words):
        artifact.check(config)


def test_another_tune_is_refused(artifact: CalibrationArtifact, llama: PreTrainedModel) -> None:
    tune = copy.deepcopy(llama)
    with torch.no_grad():
        tune.model.layers[1].self_attn.k_proj.weight.add_(0.01)
    artifact.check(tune.config)
    words = r"other weights: 1 of \d+ .*layers.1.self_attn.k_proj.weight has .*make an artifact of "
    with pytest.raises(ValueError, match=words):
        artifact.check_weights(tune)


def test_weights_that_cannot_be_compared_are_told(
    artifact: CalibrationArtifact, llama: PreTrainedModel
) -> None:
    with torch.device("meta"):
        offloaded = type(llama)(llama.config)
    with pytest.warns(UserWarning, match=r"can't be compared .*\(offloaded\)"):
        report = artifact.check_weights(offloaded)
    assert report.compared == 0 and set(report.skipped.values()) == {"offloaded"}
    bare = CalibrationArtifact("a2ats", ModelIdentity("x", artifact.model.facts), TENSORS)
    with pytest.warns(UserWarning, match="the artifact has no sample"):
        bare.check_weights(llama)
