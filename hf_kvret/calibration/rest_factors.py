"""Factors that correct estimates of what is left out, from the artifact of ``calibrate rest``."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.calibration.artifact import CalibrationArtifact
from hf_kvret.calibration.layer_checks import check_tensor
from hf_kvret.calibration.shared import artifact_place, made_once, shared_artifact
from hf_kvret.config import RetrievalConfig
from hf_kvret.integration.compatibility import retrieval_shapes

METHOD = "rest"
"""Name of the artifact's method."""
TENSOR = "log_factors"


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


def check_weights(options: RetrievalConfig, model: PreTrainedModel) -> None:
    """ValueError for a model with other weights than ``rest_artifact`` was made from."""
    if options.rest_artifact is not None:
        _load(options).check_weights(model)


def _load(options: RetrievalConfig) -> CalibrationArtifact:
    assert options.rest_artifact is not None, "only then there is one"
    return shared_artifact(options.rest_artifact, None, METHOD)


def _factors(artifact: CalibrationArtifact, config: PreTrainedConfig) -> dict[int, torch.Tensor]:
    return {
        layer: check_tensor(artifact, f"layers.{layer}.{TENSOR}", (shape.heads,), (torch.float32,))
        for layer, shape in retrieval_shapes(config).items()
    }
