"""Checks of what methods learned, before a token is cached.

An artifact of another model or version is refused with an error that names it and says how to get
another. Its tensors are believed: checksums find damage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret_model_patches.rope import Rope

Options = TypeVar("Options")


def damaged(artifact: CalibrationArtifact, what: str) -> ValueError:
    """An error that says what is wrong with an artifact, and how to get another."""
    return ValueError(
        f"the {artifact.method} artifact of {artifact.model.name} {what}: make it again with "
        f"`hf-kvret calibrate {artifact.method}`, or download it again"
    )


def calibration_options(
    artifact: CalibrationArtifact,
    cls: type[Options],
    stored_names: Mapping[str, str] = MappingProxyType({}),
    unread: Collection[str] = (),
) -> Options:
    """The options of the calibration, each of the type and in the range that ``cls`` knows.

    Args:
        artifact: names that are missing have their default, as options that came later.
        cls: the options of the method's calibration.
        stored_names: fields of ``cls`` by the other name that artifacts have for them.
        unread: names of options that older calibrations stored, and ``cls`` does not have.
    """
    stored = {n: x for n, x in artifact.options.items() if n not in ("layers", *unread)}
    try:
        return cls(**{stored_names.get(name, name): value for name, value in stored.items()})
    except (TypeError, ValueError) as error:
        raise damaged(
            artifact, f"has a wrong option ({error}; upgrade hf-kvret where a newer one made it)"
        ) from error


def layer_settings(artifact: CalibrationArtifact, layer: int) -> dict[str, Any]:
    """An artifact's settings of a layer; ValueError without any."""
    settings = artifact.options.get("layers", {}).get(str(layer))
    if settings is None:
        raise damaged(artifact, f"has nothing of layer {layer}")
    return settings


def learned_rope(artifact: CalibrationArtifact, layer: int) -> Rope:
    """RoPE of layer number ``layer`` from the artifact, on the CPU."""
    settings = layer_settings(artifact, layer)
    frequencies = artifact.tensors[f"layers.{layer}.inv_freq"]
    factor, last = settings["attention_factor"], settings.get("last", False)
    return Rope(frequencies, factor, settings["layout"], last)


def check_positions_known(config: PreTrainedConfig, instead: str, command: str) -> None:
    """Refuse a model whose rotation of keys can't be undone: for ``instead``, or an artifact that
    ``command`` makes."""
    text = config.get_text_config(decoder=True)
    rotation = getattr(text, "rope_parameters", None) or {}
    if text is not config and "mrope_section" in rotation:
        raise ValueError(
            f"{config.model_type} puts images at positions of three parts and doesn't tell its "
            "attention all of them, so the rotation of its keys can't be undone: use "
            f"{instead}, or an artifact made with {command}"
        )
