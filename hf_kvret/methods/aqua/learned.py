"""Predictors and rotation of one layer, from the artifact, checked and on a device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedConfig

from hf_kvret.artifacts import CalibrationArtifact
from hf_kvret.artifacts.checks import (
    Expected,
    check_each,
    check_layer_settings,
    check_names,
    check_options,
    check_positions_known,
    check_rotations,
    check_tensors,
    check_told,
    damaged,
    learned_rope,
    told_layers,
)
from hf_kvret.artifacts.shared import made_once, shared_artifact
from hf_kvret.methods.aqua.coding import BACKBONES, BITS, GROUPS
from hf_kvret.methods.aqua.predictors import (
    GROUP,
    KEY_INPUTS,
    SPACES,
    VALUE_INPUTS,
    Predictor,
    PredictorOptions,
)
from hf_kvret.models.compatibility import is_latent, retrieval_shapes
from hf_kvret_model_patches.rope import Rope

_MATRIX = (torch.bfloat16,)
_BIAS = (torch.float32,)
_SCALE = (torch.float16,)
_CODES = (torch.uint8,)


class LayerSettings(NamedTuple):
    """Settings of a layer; the module ``calibrator`` describes them."""

    previous: int | None
    heads: int
    head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, artifact: CalibrationArtifact, layer: int) -> Self:
        """Those that an artifact tells of layer number ``layer``.

        Raises:
            ValueError: one is missing, of another type, out of its range, or contradicts others.
        """
        kinds = dict.fromkeys(("heads", "head_dim", "value_head_dim", "bits"), int)
        settings = check_layer_settings(artifact, layer, kinds)
        previous, bits = settings.get("previous", ""), settings["bits"]
        lower = [number for number in told_layers(artifact) if number < layer]
        # An anchor, or predicted from the layer below.
        sound = previous is None or (type(previous) is int and previous == max(lower, default=None))
        sound &= settings.get("role") == ("anchor" if previous is None else "predicted")
        sound &= bits in BITS and (previous is None or bits == artifact.options.get("bits"))
        dims = settings["heads"], settings["head_dim"], settings["value_head_dim"]
        sound &= min(dims[:2]) > 0 and dims[2] >= 0
        groups = {"group": dims[1], "value_group": dims[2]}
        for name, dim in groups.items():
            group = settings.get(name)
            is_group = type(group) is int and group in GROUPS and dims[0] * dim % group == 0
            sound &= is_group if dim else group is None
        if not sound:
            names = ("role", "previous", "bits", "heads", "head_dim", "value_head_dim", *groups)
            told = ", ".join(f"{name}={settings.get(name)!r}" for name in names)
            raise damaged(artifact, f"is damaged at layer {layer} ({told})")
        return cls(previous, *dims)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers of a token, by side; 0 where values are in their keys."""
        return {"key": self.heads * self.head_dim, "value": self.heads * self.value_head_dim}


def expected_tensors(
    options: PredictorOptions, layer: LayerSettings, below: LayerSettings | None, pairs: int
) -> dict[str, Expected]:
    """What each tensor of a layer must be, by name.

    ``below`` is the layer that predicts it, None in an anchor; ``pairs`` counts its frequencies.
    """
    tensors = {"inv_freq": Expected(_BIAS, (pairs,))}
    for side, width in layer.widths.items():
        if not width:
            continue
        if below is None:
            parts = {"bias": Expected(_BIAS, (width,))} if options.anchor_mean else {}
        else:
            parts = _predictor_tensors(options, _inputs(options, side, layer, below), width)
        tensors |= {f"{side}.{name}": one for name, one in parts.items()}
    return tensors


def _inputs(
    options: PredictorOptions, side: str, layer: LayerSettings, below: LayerSettings
) -> int:
    """Numbers that a side is predicted from."""
    if side == "key":
        return below.widths["key"] if options.key_inputs == "keys" else 0
    names = options.value_inputs.split("+")
    parts = {"keys": layer.widths["key"], "values": below.widths["value"]}
    return sum(width for name, width in parts.items() if name in names)


def _predictor_tensors(options: PredictorOptions, inputs: int, outputs: int) -> dict[str, Expected]:
    if not inputs:
        return {}
    if options.predictor == "mlp":
        hidden = options.hidden or 2 * outputs
        return {
            "hidden.weight": Expected(_MATRIX, (hidden, inputs)),
            "hidden.bias": Expected(_BIAS, (hidden,)),
            "out.weight": Expected(_MATRIX, (outputs, hidden)),
            "bias": Expected(_BIAS, (outputs,)),
        }
    matrices = {"weight": (outputs, inputs)}
    if options.predictor == "low_rank":
        matrices = {"down": (options.rank, inputs), "up": (outputs, options.rank)}
    tensors = {"bias": Expected(_BIAS, (outputs,))}
    for name, shape in matrices.items():
        tensors |= _matrix(name, shape, options.predictor_bits)
    return tensors


def _matrix(name: str, shape: tuple[int, int], bits: int) -> dict[str, Expected]:
    if bits != 4:
        return {name: Expected(_MATRIX, shape)}
    rows, columns = shape
    groups = columns // min(GROUP, columns & -columns)
    return {
        f"{name}.codes": Expected(_CODES, (rows, columns // 2)),
        f"{name}.scale": Expected(_SCALE, (rows, groups)),
        f"{name}.low": Expected(_SCALE, (rows, groups)),
    }


METHOD = "aqua"


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
        parts = [p.tensors for p in (self.key, self.value) if p is not None]
        frequencies = 0 if self.rope is None else self.rope.inv_freq.nbytes
        return frequencies + sum(x.nbytes for tensors in parts for x in tensors.values())

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


def load(artifact: str, revision: str | None, sha256: str | None = None) -> CalibrationArtifact:
    """The artifact of a folder or hub id; OSError or ValueError as ``shared_artifact``."""
    return shared_artifact(artifact, revision, METHOD, sha256)


def check_artifact(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact that can't be one of a model, before any token is cached.

    Raises:
        ValueError: the first thing that is wrong: architecture, options, layers, shapes, numbers
            or rotations.
    """
    artifact.check(config)
    check_space(artifact, config)
    learned_options(artifact)
    shapes = retrieval_shapes(config)
    check_names(artifact, shapes)
    check_each(artifact, shapes, _check_layer)
    for layer, shape in shapes.items():
        settings = LayerSettings.of(artifact, layer)
        # Some models have a KV head for each query head, whatever their configuration says.
        sound = settings.heads in (shape.kv_heads, shape.heads)
        sound &= settings.head_dim == shape.head_dim
        if not sound or (settings.value_head_dim > 0) == is_latent(config):
            raise damaged(
                artifact,
                f"is damaged at layer {layer} (heads={settings.heads}, head_dim="
                f"{settings.head_dim}, value_head_dim={settings.value_head_dim}; the model has "
                f"{shape.kv_heads} KV heads of {shape.head_dim} numbers)",
            )
    check_rotations(artifact, config)


def learned_options(artifact: CalibrationArtifact) -> tuple[int, str]:
    """Bits and backbone of the calibration: the defaults of a cache with this artifact.

    Raises:
        ValueError: they are missing or unknown.
    """
    bits, backbone = artifact.options.get("bits"), artifact.options.get("backbone")
    if not isinstance(bits, int) or bits not in BITS:
        raise _unknown(artifact, "bits", bits, BITS)
    if not isinstance(backbone, str) or backbone not in BACKBONES:
        raise _unknown(artifact, "backbone", backbone, BACKBONES)
    return bits, backbone


def check_whole(artifact: CalibrationArtifact) -> None:
    """Refuse an artifact that can't be one of any model.

    Raises:
        ValueError: as ``check_artifact``, but for what only a configuration can tell.
    """
    learned_options(artifact)
    check_told(artifact, _check_layer)


def _options(artifact: CalibrationArtifact) -> PredictorOptions:
    read = ("bits", "backbone", "seed", "space", "key_inputs", "value_inputs")
    return made_once(artifact, "options", partial(check_options, artifact, PredictorOptions, read))


def _check_layer(artifact: CalibrationArtifact, layer: int) -> None:
    options = _options(artifact)
    rope = learned_rope(artifact, layer)
    settings = LayerSettings.of(artifact, layer)
    below = None if settings.previous is None else LayerSettings.of(artifact, settings.previous)
    if rope.rotary_dim > settings.head_dim:
        raise damaged(
            artifact, f"turns {rope.rotary_dim} of {settings.head_dim} numbers in layer {layer}"
        )
    expected = expected_tensors(options, settings, below, len(rope.inv_freq))
    check_tensors(artifact, layer, expected)


def check_space(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """ValueError if the model's keys can't be un-rotated, or the artifact has unknown options."""
    for name, choices in (
        ("space", SPACES),
        ("key_inputs", KEY_INPUTS),
        ("value_inputs", VALUE_INPUTS),
    ):
        if artifact.options.get(name) not in choices:
            raise _unknown(artifact, name, artifact.options.get(name), choices)
    if artifact.options["space"] == "before":
        check_positions_known(config, "predictor='none'", "`hf-kvret calibrate aqua --space after`")


def _unknown(
    artifact: CalibrationArtifact, name: str, value: object, choices: Iterable[object]
) -> ValueError:
    known = ", ".join(map(repr, choices))
    return damaged(artifact, f"has {name}={value!r}, known are {known} (upgrade hf-kvret)")


def needs_positions(artifact: CalibrationArtifact) -> bool:
    """Whether keys of any layer are un-rotated."""
    layers = artifact.options["layers"].values()
    return artifact.options["space"] == "before" and any(one["layout"] != "none" for one in layers)


def learned_layer(
    artifact: CalibrationArtifact,
    layer: int,
    with_inputs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> LearnedLayer:
    """Layer number ``layer`` of an artifact, on ``device``, one for all caches.

    Without ``with_inputs`` predictors that have inputs are left out. ``dtype`` is the model's.
    ValueError as of ``check_whole``.
    """
    check_each(artifact, [layer], _check_layer)
    make = partial(_make_layer, artifact, layer, with_inputs, device, dtype)
    return made_once(artifact, (layer, with_inputs, device, dtype), make)


def _make_layer(
    artifact: CalibrationArtifact,
    layer: int,
    with_inputs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> LearnedLayer:
    source = _below(artifact.tensors, f"layers.{layer}.")
    settings = artifact.options["layers"][str(layer)]
    rope = learned_rope(artifact, layer).to(device)
    is_before = artifact.options["space"] == "before" and rope.rotary_dim > 0
    key, value = (_predictor(source, side, with_inputs, device, dtype) for side in ("key", "value"))
    inputs = tuple(artifact.options["value_inputs"].split("+"))
    shape = settings["heads"], settings["head_dim"], settings["value_head_dim"]
    return LearnedLayer(key, value, inputs, rope if is_before else None, shape, source)


def _predictor(
    source: dict[str, torch.Tensor],
    side: str,
    with_inputs: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Predictor | None:
    tensors = _below(source, f"{side}.")
    if not tensors or (set(tensors) != {"bias"} and not with_inputs):
        return None
    # Scales and offsets of 4-bit matrices are fp16 and stay so; matrices are saved in bf16.
    placed = {
        name: x.to(device, dtype if x.dtype == torch.bfloat16 else x.dtype)
        for name, x in tensors.items()
    }
    return Predictor(placed, dtype)


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with ``prefix``, without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
