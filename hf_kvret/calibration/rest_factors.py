"""Factors that correct estimates of what is left out, from the artifact of ``calibrate rest``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.calibration.artifact import CalibrationArtifact
from hf_kvret.calibration.layer_checks import (
    Expected,
    check_names,
    check_tensors,
    damaged,
    told_layers,
)
from hf_kvret.calibration.shared import artifact_place, made_once, shared_artifact
from hf_kvret.config import RetrievalConfig
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.core.stand_ins import LayerOfModel
from hf_kvret.integration.compatibility import retrieval_shapes

METHOD = "rest"
"""Name of the artifact's method."""
TENSOR = "log_factors"
MOST_LOG = 6.0
"""Largest logarithm of a factor, and least with a minus, that a calibration tries."""


def placed(options: RetrievalConfig, config: PreTrainedConfig) -> RetrievalConfig:
    """``options`` with a folder's absolute path in ``rest_artifact``."""
    if options.rest_artifact is None:
        return options
    place = artifact_place(options.rest_artifact, config, METHOD)
    return options.replace(rest_artifact=place)


def learned_factors(
    options: RetrievalConfig, method: str, config: PreTrainedConfig
) -> dict[int, torch.Tensor]:
    """``[heads]`` fp32 on the CPU by number of the layer; empty without ``rest_artifact``.

    Raises:
        OSError, ValueError: no artifact, a damaged one, or that of another model or method.
    """
    if options.rest_artifact is None:
        return {}
    artifact = _load(options)
    made_for = artifact.options.get("cache")
    if made_for != method:
        raise ValueError(
            f"rest_artifact={options.rest_artifact!r} was made for {made_for!r}, whose estimates "
            f"are others than those of {method!r}: make one with `hf-kvret calibrate rest --cache "
            f"{method}`"
        )
    artifact.check(config)
    return made_once(artifact, METHOD, partial(_factors, artifact, config))


def tell_layers(
    layers: list[Any], options: RetrievalConfig, method: str, config: PreTrainedConfig
) -> None:
    """Tell each retrieval layer which one of the model it is, and what was learned about it.

    Raises:
        OSError, ValueError: as ``learned_factors``.
    """
    factors = learned_factors(options, method, config)
    shapes = retrieval_shapes(config)
    for number, layer in enumerate(layers):
        if isinstance(layer, RetrievalLayer):
            layer.of_model = LayerOfModel(number, shapes[number], factors.get(number))


def check_weights(options: RetrievalConfig, model: PreTrainedModel) -> None:
    """ValueError for a model with other weights than ``rest_artifact`` was made from."""
    if options.rest_artifact is not None:
        _load(options).check_weights(model)


def _load(options: RetrievalConfig) -> CalibrationArtifact:
    assert options.rest_artifact is not None, "only then there is one"
    pins = options.rest_revision, METHOD, options.rest_artifact_sha256
    return shared_artifact(options.rest_artifact, *pins, prefix="rest_")


def check_whole(artifact: CalibrationArtifact) -> None:
    """Refuse an artifact that can't be one of any model; ValueError names the first fault."""
    layers = told_layers(artifact)
    check_names(artifact, layers)
    if not isinstance(artifact.options.get("cache"), str):
        raise damaged(artifact, "doesn't tell for which cache it was made")
    for layer in layers:
        _check_layer(artifact, layer, artifact.model.facts.get("num_attention_heads"))


def _check_layer(artifact: CalibrationArtifact, layer: int, heads: object) -> None:
    # A list where layers differ.
    count = heads[layer] if isinstance(heads, list) and layer < len(heads) else heads
    if type(count) is not int:
        raise damaged(artifact, f"doesn't tell the heads of layer {layer}")
    check_tensors(artifact, layer, {TENSOR: Expected((torch.float32,), (count,))})
    if bool((artifact.tensors[f"layers.{layer}.{TENSOR}"].abs() > MOST_LOG).any()):
        raise damaged(artifact, f"has factors of layer {layer} beyond exp({MOST_LOG:g})")


def _factors(artifact: CalibrationArtifact, config: PreTrainedConfig) -> dict[int, torch.Tensor]:
    shapes = retrieval_shapes(config)
    check_names(artifact, shapes)
    for layer, shape in shapes.items():
        _check_layer(artifact, layer, shape.heads)
    return {layer: artifact.tensors[f"layers.{layer}.{TENSOR}"] for layer in shapes}
