"""Predictors and rotation of one layer, from the artifact, checked and on a device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    layer_settings,
    learned_rope,
)
from hf_kvret.artifacts.shared import made_once
from hf_kvret.methods.aqua.predictors import GROUP, Predictor, PredictorOptions
from hf_kvret_model_patches.rope import Rope

METHOD = "aqua"

# The last part of a tensor's name tells its dtype; matrices have other names, and bf16.
_DTYPES = {
    "codes": torch.uint8,
    "scale": torch.float16,
    "low": torch.float16,
    "bias": torch.float32,
    "inv_freq": torch.float32,
}


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
    shapes: dict[str, tuple[int, ...]] = {"inv_freq": (pairs,)}
    for name, width in layer.widths.items():
        if not width:
            continue
        own: dict[str, tuple[int, ...]] = {}
        if below is not None:
            own = _predictor_shapes(options, _inputs(options, name, layer, below), width)
        elif options.anchor_mean:
            own = {"bias": (width,)}
        shapes |= {f"{name}.{part}": shape for part, shape in own.items()}
    return {
        name: Expected((_DTYPES.get(name.rpartition(".")[2], torch.bfloat16),), shape)
        for name, shape in shapes.items()
    }


def _inputs(
    options: PredictorOptions, name: str, layer: LayerSettings, below: LayerSettings
) -> int:
    """Elements that a ``"key"`` or ``"value"`` is predicted from."""
    if name == "key":
        return below.widths["key"] if options.key_inputs == "keys" else 0
    widths = {"keys": layer.widths["key"], "values": below.widths["value"]}
    return sum(widths.get(source, 0) for source in options.value_inputs.split("+"))


def _predictor_shapes(
    options: PredictorOptions, inputs: int, outputs: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one predictor; none where nothing is predicted."""
    if not inputs:
        return {}
    if options.predictor == "mlp":
        hidden = options.hidden or 2 * outputs
        return {
            "hidden.weight": (hidden, inputs),
            "hidden.bias": (hidden,),
            "out.weight": (outputs, hidden),
            "bias": (outputs,),
        }
    matrices = {"weight": (outputs, inputs)}
    if options.predictor == "low_rank":
        matrices = {"down": (options.rank, inputs), "up": (outputs, options.rank)}
    shapes: dict[str, tuple[int, ...]] = {"bias": (outputs,)}
    for name, (rows, columns) in matrices.items():
        if options.predictor_bits == 16:
            shapes[name] = rows, columns
            continue
        groups = columns // min(GROUP, columns & -columns)
        shapes[f"{name}.codes"] = rows, columns // 2
        shapes[f"{name}.scale"] = shapes[f"{name}.low"] = rows, groups
    return shapes


@dataclass(frozen=True, eq=False)
class LearnedLayer:
    """Predictors and rotation of one layer, shared by all caches.

    Attributes:
        key: predicts keys from those of the layer below; None: nothing is predicted.
        value: predicts values, of what ``value_inputs`` names; None: the same.
        value_inputs: ``"keys"`` of this layer, ``"values"`` of the one below, in this order.
        rope: un-rotates keys before they are coded; None: keys are coded after RoPE.
        shape: KV heads, key dim and value dim that it was learned from.
        source: all tensors of the layer, on the CPU.
    """

    key: Predictor | None
    value: Predictor | None
    value_inputs: tuple[str, ...]
    rope: Rope | None
    shape: tuple[int, int, int]
    source: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device."""
        predictors = [p.tensors for p in (self.key, self.value) if p is not None]
        frequencies = 0 if self.rope is None else self.rope.inv_freq.nbytes
        return frequencies + sum(x.nbytes for tensors in predictors for x in tensors.values())

    @cached_property
    def fingerprint(self) -> int:
        """63-bit hash of the artifact's tensors: codes are valid with these only."""
        digest = hashlib.sha256()
        for name, x in sorted(self.source.items()):
            digest.update(name.encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return int.from_bytes(digest.digest()[:8]) >> 1

    def unpacked(self) -> LearnedLayer:
        """A copy with unpacked predictors."""
        key, value = (None if p is None else p.unpacked() for p in (self.key, self.value))
        return (
            self if (key, value) == (self.key, self.value) else replace(self, key=key, value=value)
        )

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
    return made_once(artifact, "options", partial(check_options, artifact, PredictorOptions))


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
        tensors = _below(source, f"{name}.")
        if not tensors or (set(tensors) != {"bias"} and not with_inputs):
            return None
        # Scales and offsets of 4-bit matrices are fp16 and stay so; matrices are saved in bf16.
        placed = {
            name: x.to(device, dtype if x.dtype == torch.bfloat16 else x.dtype)
            for name, x in tensors.items()
        }
        return Predictor(placed, dtype)

    def make() -> LearnedLayer:
        source = _below(artifact.tensors, f"layers.{layer}.")
        settings = LayerSettings.of(artifact, layer)
        rope = learned_rope(artifact, layer).to(device)
        is_before = options.space == "before" and rope.rotary_dim > 0
        return LearnedLayer(
            key=predictor(source, "key"),
            value=predictor(source, "value"),
            value_inputs=tuple(options.value_inputs.split("+")),
            rope=rope if is_before else None,
            shape=(settings.heads, settings.head_dim, settings.value_head_dim),
            source=source,
        )

    return made_once(artifact, (layer, with_inputs, device, dtype), make)


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
