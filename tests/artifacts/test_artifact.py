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


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"data": {"x": torch.ones(1)}}, TypeError),
        ({"options": {"x": math.nan}}, ValueError),
        ({"quality": [{"layer": 0, "error": math.inf}]}, ValueError),
    ],
)
def test_parts_that_are_no_plain_json_are_refused_at_once(
    identity: ModelIdentity, parts: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"{next(iter(parts))} is not plain JSON"):
        CalibrationArtifact("a2ats", identity, TENSORS, **parts)


def test_another_architecture_and_other_weights_are_refused(
    artifact: CalibrationArtifact, llama: PreTrainedModel
) -> None:
    artifact.check(llama.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = artifact.check_weights(llama)
    assert report.compared == len(artifact.model.weights) > 10
    assert report.differing == () and report.skipped == {}
    config = copy.deepcopy(llama.config)
    config.num_key_value_heads = 4
    words = r"of meta/tiny-llama was made for 2 KV heads, this model has 4: .*calibrate a2ats"
    with pytest.raises(ValueError, match=words):
        artifact.check(config)
    tune = copy.deepcopy(llama)
    with torch.no_grad():
        tune.model.layers[1].self_attn.k_proj.weight.add_(0.01)
    artifact.check(tune.config)
    words = r"other weights: 1 of \d+ .*layers.1.self_attn.k_proj.weight has .*make an artifact of "
    with pytest.raises(ValueError, match=words):
        artifact.check_weights(tune)


def test_a_warning_says_that_no_weights_can_be_compared(
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
