"""Predictors and rotation of one layer, from the artifact, checked and on a device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.checks import (
    Expected,
    check_each,
    check_fit,
    check_options,
    check_positions_known,
    check_tensors,
    damaged,
    layer_settings,
    learned_rope,
)
from hf_kvret.artifacts.shared import made_once
from hf_kvret.methods.aqua.predictors import Predictor, PredictorOptions
from hf_kvret_model_patches.rope import Rope

METHOD = "aqua"

# Options of older calibrations, with the value that is left, and those that changed other values.
_RETIRED = {
    "backbone": "higgs",
    "predictor": "linear",
    "predictor_bits": 16,
    "key_inputs": "keys",
    "value_inputs": "keys+values",
}
_UNREAD = ("rank", "hidden", "steps", "anchor_every")


class LayerSettings(NamedTuple):
    """Settings of a layer, as ``predictors`` describes them."""

    previous: int | None
    heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, artifact: CalibrationArtifact, layer: int) -> Self:
        """The settings that an artifact has for layer number ``layer``.

        Raises:
            ValueError: it has none.
        """
        settings = layer_settings(artifact, layer)
        return cls(*(settings[name] for name in cls._fields))

    @property
    def widths(self) -> dict[str, int]:
        """Elements of a token's key and value; 0 where values are in their keys."""
        return {"key": self.heads * self.head_dim, "value": self.heads * self.value_head_dim}


def expected_tensors(
    options: PredictorOptions, layer: LayerSettings, below: LayerSettings | None, pairs: int
) -> dict[str, Expected]:
    """The dtype and shape of each tensor of a layer, by name.

    ``below`` is the layer that predicts it, None in an anchor; ``pairs`` counts its frequencies.
    """
    tensors = {"inv_freq": Expected((torch.float32,), (pairs,))}
    for name, width in layer.widths.items():
        if width and (below is not None or options.anchor_mean):
            tensors[f"{name}.bias"] = Expected((torch.float32,), (width,))
        if width and below is not None:
            inputs = below.widths[name] + (layer.widths["key"] if name == "value" else 0)
            tensors[f"{name}.weight"] = Expected((torch.bfloat16,), (width, inputs))
    return tensors


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Predictors and rotation of one layer, shared by all caches.

    Attributes:
        key: predicts keys from those of the layer below; None: nothing is predicted.
        value: predicts values, from keys of this layer and values of the one below; None: the same.
        rope: un-rotates keys before they are coded; None: keys are coded after RoPE.
        shape: KV heads, key dim and value dim that it was learned from.
        source: all tensors of the layer, on the CPU.
    """

    key: Predictor | None
    value: Predictor | None
    rope: Rope | None
    shape: tuple[int, int, int]
    source: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        frequencies = 0 if self.rope is None else self.rope.inv_freq.nbytes
        return frequencies + sum(p.nbytes for p in (self.key, self.value) if p is not None)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the artifact's tensors: codes are valid with these only."""
        digest = hashlib.sha256()
        for name, x in sorted(self.source.items()):
            digest.update(name.encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:8]) >> 1

    def check_shape(self, heads: int, key_dim: int, value_dim: int) -> None:
        """ValueError unless tokens have the shape that it was learned from."""
        if (heads, key_dim, value_dim) != self.shape:
            names = "{} KV heads, key dim {}, value dim {}"
            raise ValueError(
                f"the aqua artifact was learned from {names.format(*self.shape)}; this layer has "
                f"{names.format(heads, key_dim, value_dim)}: all KV heads of a token predict "
                "together, so a part of them (tensor parallelism) can't be served; use "
                "predictor='none'"
            )


def check_artifact(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact that can't be one of a model, before any token is cached.

    Raises:
        ValueError: the first thing that is wrong: architecture, options, layers or shapes.
    """
    artifact.check(config)
    if learned_options(artifact).space == "before":
        check_positions_known(config, "predictor='none'", "`hf-kvret calibrate aqua --space after`")
    check_fit(artifact, config, _check_layer, _shape)


def _shape(artifact: CalibrationArtifact, layer: int) -> tuple[int, int]:
    """KV heads and head dim that a layer was learned from."""
    settings = LayerSettings.of(artifact, layer)
    return settings.heads, settings.head_dim


def learned_options(artifact: CalibrationArtifact) -> PredictorOptions:
    """The options of the calibration; ValueError for one that is missing or wrong."""
    return made_once(artifact, "options", partial(_read_options, artifact))


def _read_options(artifact: CalibrationArtifact) -> PredictorOptions:
    for name, value in _RETIRED.items():
        stored = artifact.options.get(name, value)
        if stored != value:
            raise damaged(artifact, f"has {name}={stored!r}, and this version reads {value!r} only")
    return check_options(artifact, PredictorOptions, unread=(*_RETIRED, *_UNREAD))


def _check_layer(artifact: CalibrationArtifact, layer: int) -> None:
    options = learned_options(artifact)
    rope = learned_rope(artifact, layer)
    settings = LayerSettings.of(artifact, layer)
    below = None if settings.previous is None else LayerSettings.of(artifact, settings.previous)
    expected = expected_tensors(options, settings, below, len(rope.inv_freq))
    check_tensors(artifact, layer, expected)


def needs_positions(artifact: CalibrationArtifact) -> bool:
    """Whether keys of any layer are un-rotated."""
    layers = artifact.options["layers"].values()
    is_before = learned_options(artifact).space == "before"
    return is_before and any(settings["layout"] != "none" for settings in layers)


def learned_layer(
    artifact: CalibrationArtifact,
    layer: int,
    with_inputs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    Without ``with_inputs`` predictors that have inputs are left out. ``dtype`` is the model's.
    ValueError where tensors are missing or of other shapes.
    """
    check_each(artifact, [layer], _check_layer)
    options = learned_options(artifact)

    def predictor(source: dict[str, torch.Tensor], name: str) -> Predictor | None:
        bias, weight = (source.get(f"{name}.{part}") for part in ("bias", "weight"))
        if bias is None or (weight is not None and not with_inputs):
            return None
        return Predictor(None if weight is None else weight.to(device, dtype), bias.to(device))

    def make() -> LearnedLayer:
        prefix = f"layers.{layer}."
        source = {
            name.removeprefix(prefix): x
            for name, x in artifact.tensors.items()
            if name.startswith(prefix)
        }
        settings = LayerSettings.of(artifact, layer)
        rope = learned_rope(artifact, layer).to(device)
        is_before = options.space == "before" and rope.rotary_dim > 0
        return LearnedLayer(
            key=predictor(source, "key"),
            value=predictor(source, "value"),
            rope=rope if is_before else None,
            shape=(settings.heads, settings.head_dim, settings.value_head_dim),
            source=source,
        )

    return made_once(artifact, (layer, with_inputs, device, dtype), make)
