"""Checks of what methods learned, before a token is cached: each option, tensor and setting.

A checksum finds damage; these find an artifact that was made wrongly, whatever its checksum says.
Each raises ValueError that names the artifact, what is wrong with it, and how to get another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from transformers import PreTrainedConfig

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.shared import made_once
from hf_kvret.models.compatibility import retrieval_shapes
from hf_kvret_model_patches.rope import Rope

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LARGEST = 1e12
"""The largest element of an artifact. Keys, weights and their products stay far below, and their
sums stay finite in fp32."""

# Frequencies are powers, whose last bit depends on the machine.
_SAME_FREQUENCY = 1e-5

Options = TypeVar("Options", bound="DataclassInstance")


def check_types(options: DataclassInstance) -> None:
    """Check that every field has the type, or one of the types, of its annotation.

    An int is accepted for a float. A bool is not accepted for an int, and numbers of numpy or torch
    are not accepted, because options are saved as JSON.

    Raises:
        TypeError: the field, its value, and what it may be.
    """
    hints = get_type_hints(type(options))
    for field in fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        types: tuple[Any, ...] = get_args(hint) or (hint,)
        if type(value) not in types and not (float in types and type(value) is int):
            choices = " or ".join("None" if x is type(None) else x.__name__ for x in types)
            raise TypeError(
                f"{field.name}={value!r} is of type {type(value).__name__}: pass {choices}"
            )


def check_choices(options: object, **choices: Collection[object]) -> None:
    """ValueError for the first of ``options`` that is none of its ``choices``."""
    for name, values in choices.items():
        value = getattr(options, name)
        if value not in values:
            raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, values))}")


def check_least(options: object, **bounds: int) -> None:
    """ValueError for the first of ``options`` that is below its least value; None passes."""
    for name, least in bounds.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: {least} or more")


class Expected(NamedTuple):
    """The dtypes and the shape that a tensor may have."""

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]


def damaged(artifact: CalibrationArtifact, what: str) -> ValueError:
    """An error that says what is wrong with an artifact, and how to get another."""
    return ValueError(
        f"the {artifact.method} artifact of {artifact.model.name} {what}: make it again with "
        f"`hf-kvret calibrate {artifact.method}`, or download it again"
    )


def check_options(
    artifact: CalibrationArtifact,
    cls: type[Options],
    required: Collection[str],
    stored_names: Mapping[str, str] = MappingProxyType({}),
) -> Options:
    """The options of the calibration, each of the type and in the range that ``cls`` knows.

    Args:
        artifact: names that are missing have their default, as options that came later.
        cls: the options of the method's calibration.
        required: names that must be there, as they are stored.
        stored_names: fields of ``cls`` by the other name that artifacts have for them.
    """
    stored = {name: value for name, value in artifact.options.items() if name != "layers"}
    missing = [name for name in required if name not in stored]
    own = {stored_names.get(name, name): value for name, value in stored.items()}
    if missing:
        raise damaged(artifact, f"has no option {', '.join(missing)}")
    unknown = sorted(own.keys() - {field.name for field in fields(cls)})
    if unknown:
        raise damaged(
            artifact,
            f"has the option {', '.join(unknown)}, unknown to this version (upgrade hf-kvret)",
        )
    try:
        return cls(**own)
    except (TypeError, ValueError) as error:
        raise damaged(
            artifact, f"has a wrong option ({error}; upgrade hf-kvret where a newer one made it)"
        ) from error


def layer_numbers(artifact: CalibrationArtifact) -> list[int]:
    """Numbers of the layers that an artifact tells of, in order."""
    layers = artifact.options.get("layers")
    names = list(layers) if isinstance(layers, dict) else []
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    if not numbers or [str(number) for number in numbers] != names:
        raise damaged(artifact, f"tells of layers {', '.join(names) or 'none'}")
    return sorted(numbers)


def check_layers(
    artifact: CalibrationArtifact,
    layers: Collection[int],
    check: Callable[[CalibrationArtifact, int], object],
) -> None:
    """Check each layer, and refuse settings or tensors of other layers, and of none."""
    expected = {str(layer) for layer in layers}
    settings = artifact.options.get("layers")
    other = sorted(settings.keys() - expected) if isinstance(settings, dict) else []
    if other:
        raise damaged(artifact, f"tells of layers {', '.join(other)}, which don't retrieve")
    foreign = [
        name
        for name in artifact.tensors
        if not name.startswith("layers.") or name.split(".")[1] not in expected
    ]
    if foreign:
        raise damaged(artifact, f"has tensors that nothing reads ({', '.join(sorted(foreign))})")
    check_each(artifact, layers, check)


def check_each(
    artifact: CalibrationArtifact,
    layers: Iterable[int],
    check: Callable[[CalibrationArtifact, int], object],
) -> None:
    """Call a method's own ``check`` of an artifact and a layer for each of ``layers``, once."""
    for layer in layers:
        made_once(artifact, ("checked", layer), partial(check, artifact, layer))


def check_fit(
    artifact: CalibrationArtifact,
    config: PreTrainedConfig,
    check: Callable[[CalibrationArtifact, int], object],
    shape_of: Callable[[CalibrationArtifact, int], tuple[int, int]],
) -> None:
    """Refuse an artifact that can't be one of a model, before any token is cached.

    Args:
        artifact: of the model's architecture, as ``CalibrationArtifact.check`` found.
        config: of the model.
        check: the method's own of a layer.
        shape_of: KV heads and head dim that a layer was learned from.
    """
    shapes = retrieval_shapes(config)
    check_layers(artifact, shapes, check)
    for layer, shape in shapes.items():
        heads, dim = shape_of(artifact, layer)
        # Some models have a KV head for each query head, whatever their configuration says.
        if heads not in (shape.kv_heads, shape.heads) or dim != shape.head_dim:
            raise damaged(
                artifact,
                f"is damaged at layer {layer} ({heads} heads of {dim} numbers; the model has "
                f"{shape.kv_heads} of {shape.head_dim})",
            )
    check_rotations(artifact, config)


def check_tensors(
    artifact: CalibrationArtifact, layer: int, expected: Mapping[str, Expected]
) -> None:
    """Check that the tensors of a layer are ``expected``, by name, and of sound numbers."""
    prefix = f"layers.{layer}."
    for name, one in expected.items():
        check_tensor(artifact, prefix + name, one.shape, one.dtypes)
    names = {name.removeprefix(prefix) for name in artifact.tensors if name.startswith(prefix)}
    if names != expected.keys():
        more = ", ".join(prefix + name for name in sorted(names - expected.keys()))
        raise damaged(artifact, f"has {more}, which nothing reads with its options")


def check_tensor(
    artifact: CalibrationArtifact,
    name: str,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> torch.Tensor:
    """The tensor ``name``, of sound elements, one of ``dtypes`` and ``shape``; None: any size."""
    tensor = artifact.tensors.get(name)
    if tensor is None:
        raise damaged(artifact, f"has no {name}")
    if tensor.dtype not in dtypes:
        choices = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise damaged(artifact, f"has {name} in {dtype}, not in {choices}")
    fits = len(shape) == tensor.ndim and all(
        expected_size in (None, size)
        for expected_size, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise damaged(artifact, f"has {name} {tuple(tensor.shape)}, not [{sizes}]")
    if tensor.is_floating_point() and tensor.numel():
        low, high = (float(x) for x in tensor.aminmax())
        # Compared in this way round, NaN is beyond any bound.
        if not (-float("inf") < low and high < float("inf")):
            raise damaged(artifact, f"has {name} with NaN or infinity")
        if max(-low, high) > LARGEST:
            raise damaged(artifact, f"has {name} with {max(-low, high):.3g}, beyond {LARGEST:g}")
    return tensor


def check_layer_settings(
    artifact: CalibrationArtifact, layer: int, types: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """An artifact's settings of a layer, of which those in ``types`` must have these types."""
    layers = artifact.options.get("layers")
    entry = layers.get(str(layer)) if isinstance(layers, dict) else None
    settings = entry if isinstance(entry, dict) else {}
    wrong = [
        name
        for name, cls in types.items()
        if not isinstance(settings.get(name), cls) or isinstance(settings.get(name), bool)
    ]
    if wrong:
        raise damaged(artifact, f"doesn't tell {', '.join(wrong)} of layer {layer} as it should")
    return settings


def learned_rope(artifact: CalibrationArtifact, layer: int) -> Rope:
    """RoPE of layer number ``layer`` from the artifact, on the CPU."""
    types = {"attention_factor": (int, float), "layout": (str,)}
    settings = check_layer_settings(artifact, layer, types)
    name = f"layers.{layer}.inv_freq"
    frequencies = check_tensor(artifact, name, (None,), (torch.float32,))
    last = settings.get("last", False)
    if not isinstance(last, bool):
        raise damaged(artifact, f"is damaged at layer {layer} (last={last!r})")
    try:
        return Rope(frequencies, float(settings["attention_factor"]), settings["layout"], last)
    except ValueError as error:
        raise damaged(artifact, f"is damaged at layer {layer} ({error})") from error


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


def check_rotations(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """Refuse an artifact that lacks a layer that retrieves, or turns one otherwise than the model.

    Frequencies and factor are computed from the configuration, once for models that ``check``
    takes for one. How the model pairs numbers is believed to the artifact where the model's code
    doesn't tell it.
    """
    text = config.get_text_config(decoder=True)
    key = ("rotations", type(text), getattr(text, "max_position_embeddings", None))
    made_once(artifact, key, partial(_check_rotations, artifact, config))


def _check_rotations(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    for layer in retrieval_shapes(config):
        rope = learned_rope(artifact, layer)
        try:
            own = Rope.of(config, layer)
        except ValueError:
            # The model's code doesn't tell how it pairs elements.
            own = Rope.of(config, layer, rope.layout)
        ends = [" at the end of a row" if one.last else "" for one in (rope, own)]
        if (len(own.inv_freq), own.last) != (len(rope.inv_freq), rope.last):
            raise damaged(
                artifact,
                f"has {len(rope.inv_freq)} frequencies{ends[0]} for layer {layer}, the model "
                f"{len(own.inv_freq)}{ends[1]}",
            )
        if own.layout != rope.layout:
            raise damaged(
                artifact,
                f"has layout={rope.layout!r} for layer {layer}, the model {own.layout!r}",
            )
        factors = torch.tensor([own.attention_factor, rope.attention_factor])
        for what, expected, value in (
            ("frequencies", own.inv_freq, rope.inv_freq),
            ("an attention factor", *factors.unsqueeze(1)),
        ):
            if not torch.allclose(value, expected, rtol=_SAME_FREQUENCY, atol=0.0):
                worst = int((value - expected).abs().argmax())
                raise damaged(
                    artifact,
                    f"has {what} for layer {layer} that the model doesn't have "
                    f"({value[worst]:.6g} for {expected[worst]:.6g})",
                )
