"""Artifacts shared within a process: each is read once, and derived objects are made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from transformers import PreTrainedConfig

from hf_kvret.calibration.artifact import CalibrationArtifact
from hf_kvret.calibration.files import DESCRIPTION
from hf_kvret.integration.compatibility import retrieval_layers
from hf_kvret_model_patches.rope import Rope

Value = TypeVar("Value")

# Artifacts live as long as their users; a few of the newest are kept alive for the next cache.
_artifacts: WeakValueDictionary[tuple[Any, ...], CalibrationArtifact] = WeakValueDictionary()
_newest: deque[CalibrationArtifact] = deque(maxlen=4)
_values: WeakKeyDictionary[CalibrationArtifact, dict[Hashable, Any]] = WeakKeyDictionary()


def artifact_place(artifact: str | None, config: PreTrainedConfig, method: str) -> str:
    """A hub id unchanged, or a folder's absolute path; for None the model's own artifact.

    That is the folder named ``method`` in the folder that the model was loaded from.

    Raises:
        ValueError: there is no such folder; the message says how to make an artifact.
    """
    if artifact is not None:
        folder = Path(artifact).expanduser()
        return str(folder.absolute()) if folder.is_dir() else artifact
    home = getattr(config, "_name_or_path", "")
    folder = Path(home) / method
    if not home or not folder.is_dir():
        raise ValueError(
            f"{method} needs a calibration artifact of the model: pass "
            f"artifact='folder-or-hub-id', or make one with `hf-kvret calibrate {method} --model "
            f"{home or 'MODEL'} --text FILE --out DIR`"
        )
    return str(folder.absolute())


def shared_artifact(artifact: str, revision: str | None, method: str) -> CalibrationArtifact:
    """The artifact of a folder or hub id; read anew when a folder was rewritten.

    Raises:
        OSError, ValueError: as ``CalibrationArtifact.from_pretrained``.
    """
    file = (Path(artifact).expanduser() / DESCRIPTION).absolute()
    stamp = (str(file), file.stat().st_mtime_ns) if file.is_file() else None
    key = method, artifact, revision, stamp
    result = _artifacts.get(key)
    if result is None:
        result = CalibrationArtifact.from_pretrained(artifact, method=method, revision=revision)
        _artifacts[key] = result
    if not _newest or _newest[-1] is not result:
        _newest.append(result)
    return result


def made_once(artifact: CalibrationArtifact, key: Hashable, make: Callable[[], Value]) -> Value:
    """The result of ``make`` for ``key``, cached as long as the artifact lives."""
    values = _values.setdefault(artifact, {})
    if key not in values:
        values[key] = make()
    return values[key]


def check_revision(artifact: str | None, revision: str | None) -> None:
    """ValueError for a revision without an artifact."""
    if revision is not None and artifact is None:
        raise ValueError(
            f"revision={revision!r} without artifact: name the artifact's hub id too, or leave the "
            "revision out"
        )


def check_tensor(
    artifact: CalibrationArtifact, name: str, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """The tensor ``name`` of an artifact, of finite numbers and of ``shape``; None: any size.

    Raises:
        ValueError: it is missing, not finite, or of another shape; the message names the remedy.
    """
    again = f"make it again with `hf-kvret calibrate {artifact.method}`"
    owner = f"the {artifact.method} artifact of {artifact.model.name}"
    tensor = artifact.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{owner} has no {name}: {again}")
    fits = len(shape) == tensor.ndim and all(
        expected_size in (None, size)
        for expected_size, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{owner} has {name} {tuple(tensor.shape)}, not [{sizes}]: {again}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{owner} has {name} with NaN or infinity: {again}")
    return tensor


def check_layer_settings(
    artifact: CalibrationArtifact, layer: int, fields: Mapping[str, type | tuple[type, ...]]
) -> dict[str, Any]:
    """An artifact's settings of a layer, of which ``fields`` must have these types.

    Raises:
        ValueError: a field is missing or of another type.
    """
    layers = artifact.options.get("layers")
    entry = layers.get(str(layer)) if isinstance(layers, dict) else None
    settings = entry if isinstance(entry, dict) else {}
    wrong = [name for name, kind in fields.items() if not isinstance(settings.get(name), kind)]
    if wrong:
        raise ValueError(
            f"the {artifact.method} artifact of {artifact.model.name} doesn't tell "
            f"{', '.join(wrong)} of layer {layer} as it should: make it again with `hf-kvret "
            f"calibrate {artifact.method}`"
        )
    return settings


def learned_rope(artifact: CalibrationArtifact, layer: int) -> Rope:
    """RoPE of layer number ``layer`` from the artifact, on the CPU.

    Raises:
        ValueError: missing or invalid settings.
    """
    fields = {"attention_factor": (int, float), "layout": (str,)}
    settings = check_layer_settings(artifact, layer, fields)
    frequencies = check_tensor(artifact, f"layers.{layer}.inv_freq", (None,))
    factor, last = float(settings["attention_factor"]), settings.get("last", False) is True
    try:
        return Rope(frequencies, factor, settings["layout"], last)
    except ValueError as error:
        raise ValueError(
            f"the {artifact.method} artifact of {artifact.model.name} is damaged at layer {layer} "
            f"({error}): make it again with `hf-kvret calibrate {artifact.method}`"
        ) from error


def check_rotations(artifact: CalibrationArtifact, config: PreTrainedConfig) -> None:
    """ValueError unless the artifact has all layers that retrieve, rotated as in the model."""
    for layer in retrieval_layers(config):
        rope = learned_rope(artifact, layer)
        own = Rope.of(config, layer, rope.layout)
        if (len(own.inv_freq), own.last) != (len(rope.inv_freq), rope.last):
            ends = [" at the end of a row" if one.last else "" for one in (rope, own)]
            raise ValueError(
                f"the {artifact.method} artifact of {artifact.model.name} has {len(rope.inv_freq)} "
                f"frequencies{ends[0]} for layer {layer}, the model {len(own.inv_freq)}{ends[1]}: "
                f"make it again with `hf-kvret calibrate {artifact.method}`"
            )
