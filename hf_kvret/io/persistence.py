"""Saving a filled cache and loading it again, also in another process.

``cache.safetensors`` holds every tensor under ``layers.<number>.<part>``; ``cache.json`` says
which method and options it belongs to and what the model's cache layers look like. Layers that
are not ours (sliding, linear) are saved attribute by attribute.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from hf_kvret.core.layer import RetrievalLayer

if TYPE_CHECKING:
    from hf_kvret.cache import RetrievalCache

    CacheType = TypeVar("CacheType", bound=RetrievalCache)

FORMAT_VERSION = 1
_TENSORS, _DESCRIPTION = "cache.safetensors", "cache.json"

# Options that do not affect what is stored, so a load may change them.
_STORE_OPTIONS = {"store", "slots", "device_budget"}
_CALL_OPTIONS = {
    *("max_draft", "flush", "track_recall", "prefill_chunk", "graph", "select_heads"),
    *("rest", "rest_blocks", "rest_artifact", "warn_lost_mass"),
}
_FREE_OPTIONS = {"top_k", *_CALL_OPTIONS, *_STORE_OPTIONS}
FORK_OPTIONS = frozenset(_FREE_OPTIONS - _STORE_OPTIONS)
"""Options that a fork may change: they don't affect what is held, nor where."""
# A load may change these too: the artifact may be in another place. The index itself refuses an
# artifact other than the one that it was saved with.
_MOVABLE_OPTIONS = {"artifact", "revision", "artifact_sha256"}


def save(cache: RetrievalCache, directory: Path) -> None:
    """Write ``cache`` to ``directory``, which is made if needed."""
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, RetrievalLayer):
            parts: dict[str, torch.Tensor] = layer.state_dict()
            plain: Any = {}
        else:
            parts, plain = _split(vars(layer))
        tensors |= {f"layers.{number}.{name}": tensor for name, tensor in parts.items()}
        layers.append({"type": type(layer).__name__, "values": plain})
    description = {
        "format_version": FORMAT_VERSION,
        "method": cache.name,
        "model": cache.model_shape,
        "options": dataclasses.asdict(cache.options_to_load()),
        "layers": layers,
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / _TENSORS)
    (directory / _DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    # safetensors makes files that only their owner can read.
    shutil.copymode(directory / _DESCRIPTION, directory / _TENSORS)


def load(
    cls: type[CacheType],
    directory: Path,
    config: PreTrainedConfig,
    device: torch.device,
    changes: dict[str, Any],
) -> CacheType:
    """The cache in ``directory`` as a ``cls``; arguments as in ``from_pretrained``."""
    description = _read_description(directory)
    if description["method"] != cls.name:
        raise ValueError(
            f"{directory} holds a {description['method']!r} cache, not {cls.name!r}: load it with "
            "the class of that method"
        )
    changes = cls.config_class.current_names(changes)
    movable = _MOVABLE_OPTIONS if cls.needs_artifact else set()
    check_changes(changes, _FREE_OPTIONS | movable)
    if "artifact" in changes:
        # The saved revision belongs to the saved artifact.
        changes = {"revision": None, **changes}
    if changes.get("store", "split") not in ("auto", "split"):
        # The saved budget belongs to the saved store.
        changes = {"device_budget": None, **changes}
    options = cls.config_class.from_saved(description["options"]).replace(**changes)
    cache = cls(config, options)
    saved_types = [layer["type"] for layer in description["layers"]]
    _check_model(directory, cache, description["model"], saved_types)
    tensors = _read_tensors(directory)
    if {name: list(tensor.shape) for name, tensor in tensors.items()} != description["tensors"]:
        raise ValueError(
            f"{directory / _TENSORS} does not hold what {_DESCRIPTION} says: the files are of "
            "different caches or damaged; save the cache again"
        )
    for number, layer in enumerate(cache.layers):
        prefix = f"layers.{number}."
        parts = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        values = description["layers"][number]["values"]
        try:
            if isinstance(layer, RetrievalLayer):
                layer.load_state_dict(parts, device)
            else:
                vars(layer).update(_join(parts, values, device))
        except KeyError as missing:
            raise ValueError(
                f"{directory / _TENSORS} has no {prefix}{missing.args[0]}: the file is damaged or "
                "from another version; save the cache again"
            ) from missing
    return cache


def check_fork(changes: dict[str, Any]) -> None:
    """ValueError unless all ``changes`` are options that may differ in a fork."""
    check_changes(changes, set(FORK_OPTIONS))


def check_changes(changes: dict[str, Any], free: set[str]) -> None:
    """ValueError unless all ``changes`` are among the options that are ``free`` to change."""
    unchangeable = sorted(set(changes) - free)
    if unchangeable:
        raise ValueError(
            f"{', '.join(unchangeable)}: not an option that a filled cache can change; free to "
            f"change are {', '.join(sorted(free))}"
        )


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / _DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache in {directory}: {_DESCRIPTION} is missing")
    try:
        description = json.loads(path.read_text())
        version = description["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is corrupt ({error}): save the cache again") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, this hf_kvret reads {FORMAT_VERSION}: save the "
            "cache again"
        )
    if not _is_complete(description):
        raise ValueError(f"{path} is corrupt (a part is missing): save the cache again")
    return description


def _is_complete(description: dict[str, Any]) -> bool:
    kinds = {"method": str, "model": dict, "options": dict, "layers": list, "tensors": dict}
    return all(isinstance(description.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(layer, dict) and {"type", "values"} <= layer.keys()
        for layer in description["layers"]
    )


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / _TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache in {directory}: {_TENSORS} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is corrupt or truncated ({error}): save the cache again"
        ) from error


def _check_model(
    directory: Path, cache: RetrievalCache, saved_shape: dict[str, Any], saved_types: list[str]
) -> None:
    """ValueError for a cache saved from a model of another shape or with other layer types."""
    shape = cache.model_shape
    differences = [
        _first_difference(name, saved_shape.get(name), shape[name])
        for name in shape
        if shape[name] != saved_shape.get(name)
    ]
    if differences:
        theirs, ours = (
            ", ".join(f"{difference[0]} {difference[side]}" for difference in differences)
            for side in (1, 2)
        )
        raise ValueError(
            f"{directory} was saved from another model: it has {theirs}, this model {ours}"
        )
    types = [type(layer).__name__ for layer in cache.layers]
    if types != saved_types:
        raise ValueError(
            f"{directory} was saved from another model: its cache layers are "
            f"{_summary(saved_types)}, this model's are {_summary(types)}"
        )


def _first_difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any]:
    """``name`` and its two values; of lists by layer, of the first layer that differs."""
    if not (isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours)):
        return name, theirs, ours
    place = next(place for place, value in enumerate(theirs) if value != ours[place])
    return f"{name}[{place}]", theirs[place], ours[place]


def _split(value: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors by path, and the same structure with ``{"tensor": path}`` in their place."""
    if isinstance(value, torch.Tensor):
        return {prefix: value.detach().cpu().contiguous()}, {"tensor": prefix}
    if isinstance(value, dict):
        tensors: dict[str, torch.Tensor] = {}
        items = []
        for key, item in value.items():
            parts, plain = _split(item, f"{prefix}.{key}" if prefix else str(key))
            tensors |= parts
            items.append([key, plain])
        return tensors, {"dict": items}
    if isinstance(value, list | tuple):
        parts, plain = _split(dict(enumerate(value)), prefix)
        return parts, {"list": [item for _, item in plain["dict"]]}
    if isinstance(value, torch.dtype | torch.device):
        return {}, {type(value).__name__: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return {}, {"plain": value}
    raise TypeError(f"cannot save {prefix} of type {type(value).__name__}")


def _join(parts: dict[str, torch.Tensor], plain: Any, device: torch.device) -> Any:
    """The inverse of ``_split``, on ``device``."""
    ((kind, value),) = plain.items()
    if kind == "tensor":
        return parts[value].to(device)
    if kind == "dict":
        return {key: _join(parts, item, device) for key, item in value}
    if kind == "list":
        return [_join(parts, item, device) for item in value]
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "device":
        return device
    return value


def _summary(types: list[str]) -> str:
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))
