"""Saving a filled cache and loading it again, also in another process.

A folder holds ``cache.json``, which says what the cache is, and the shards of tensors that it
names; see docs/formats.md. Whatever is read is checked before it is used, and nothing that a file
says becomes code or the name of an attribute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from hf_kvret.contracts.state import Tensors
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.ranks import check_save
from hf_kvret.saved import foreign_layers
from hf_kvret.saved.agreement import check_agreement
from hf_kvret.saved.description import (
    DESCRIPTION,
    STEM,
    Description,
    digest_of,
    encoded,
    is_of_cache,
)
from hf_kvret.saved.folder import Replacement, replacing
from hf_kvret.saved.origin import FilledCache, restore_origin, saved_origin
from hf_kvret.saved.saved_options import options_to_load
from hf_kvret.saved.shards import ShardWriter

CacheType = TypeVar("CacheType", bound=FilledCache)

# Begins the names of what the model keeps of the conversation, where it keeps any.
_MODEL_STATE = "model_state."


def save(cache: FilledCache, directory: Path, overwrite: bool | None) -> None:
    """Write ``cache`` to ``directory``, which is made if needed, and note that it lies there.

    Args:
        cache: to be saved.
        directory: where to.
        overwrite: as in ``save_pretrained``.

    Raises:
        FileExistsError: a cache is there that may not be replaced.
        OSError: the disk is full, for instance; says whether what was there before is as it was.
        TypeError: a cache layer of transformers that is not known.
        ValueError: what would be replaced is not of a cache; a process group of several ranks.
    """
    check_save()
    # Numbers are on the CPU also where another default device was set; as in `load`.
    with torch.device("cpu"), replacing(directory, DESCRIPTION, STEM) as replacement:
        _check_overwrite(cache, directory, overwrite)
        content = encoded(_write(cache, replacement))
        digest = hashlib.sha256(content).hexdigest()
        try:
            replacement.commit(content)
        finally:
            if digest_of(directory) == digest:
                note_saved(cache, directory, digest)


def _write(cache: FilledCache, replacement: Replacement) -> dict[str, Any]:
    """Write the tensors of ``cache``; returns the content of its ``cache.json``."""
    writer, layers = ShardWriter(replacement), []
    for number, layer in enumerate(cache.layers):
        values: dict[str, Any] = {}
        if isinstance(layer, RetrievalLayer):
            tensors = layer.state_dict()
        else:
            tensors, values = foreign_layers.parts_of(layer)
        writer.add(f"layers.{number}.", tensors)
        layers.append({"type": type(layer).__name__, "values": values})
    origin, tensors = saved_origin(cache)
    writer.add("", tensors)
    writer.add(_MODEL_STATE, cache.model_state.state_dict(cache.get_seq_length()))
    writer.finish()
    return {
        "method": cache.name,
        "model": cache.model_shape,
        "options": dataclasses.asdict(cache.options_to_load()),
        **origin,
        "layers": layers,
        "files": writer.files,
        "tensors": writer.checksums,
    }


def load(
    cls: type[CacheType],
    directory: Path,
    config: PreTrainedConfig,
    device: torch.device,
    changes: dict[str, Any],
) -> tuple[CacheType, str]:
    """The cache in ``directory`` as a ``cls``, and the digest of what was read.

    Arguments as in ``from_pretrained``.
    """
    while True:
        description = Description.read(directory)
        try:
            with torch.device("cpu"):
                cache, hint = _empty_cache(cls, directory, description.content, config, changes)
                _fill(cache, directory, description, config, device, hint)
            return cache, description.digest
        except FileNotFoundError:
            # Another process may have replaced the cache in the meantime.
            if digest_of(directory) == description.digest:
                raise


def _fill(
    cache: FilledCache,
    directory: Path,
    description: Description,
    config: PreTrainedConfig,
    device: torch.device,
    hint: str,
) -> None:
    """Give a new ``cache`` what is saved; ``hint``: more to say where a layer won't fit."""
    tensors, content = description.tensors(directory), description.content
    for number, layer in enumerate(cache.layers):
        values, part = content["layers"][number]["values"], tensors.part(f"layers.{number}.")
        try:
            if isinstance(layer, RetrievalLayer):
                layer.load_state_dict(part, device)
            else:
                foreign_layers.restore(layer, values, part, device)
        except KeyError as missing:
            raise ValueError(
                f"{directory} has no layers.{number}.{missing.args[0]}: it is damaged or from "
                "another version; save the cache again"
            ) from missing
        except ValueError as error:
            more = f"; {hint}" if hint else ""
            raise ValueError(f"{directory}: layer {number}: {error}{more}") from error
    text = config.get_text_config(decoder=True)
    check_agreement(directory, cache, getattr(text, "v_head_dim", None))
    restore_origin(cache, content, tensors.others("layers."), device)
    _restore_model_state(directory, cache, tensors.part(_MODEL_STATE), device)


def _restore_model_state(
    directory: Path, cache: FilledCache, state: Tensors, device: torch.device
) -> None:
    """Give ``cache`` the ``state`` that its model keeps; ValueError for what none does."""
    if not state:
        return
    length = cache.get_seq_length()
    # Before the first token there is no batch.
    rows = cache.retrieval_layers[0].batch_size if length else 0
    try:
        cache.model_state.load_state_dict(state, rows, length, device)
    except ValueError as error:
        raise ValueError(f"{directory}: what the model kept of the text: {error}") from error


def _empty_cache(
    cls: type[CacheType],
    directory: Path,
    content: Mapping[str, Any],
    config: PreTrainedConfig,
    changes: dict[str, Any],
) -> tuple[CacheType, str]:
    """A new cache with the saved options and ``changes``, and the hint of ``options_to_load``."""
    if content["method"] != cls.name:
        raise ValueError(
            f"{directory} holds a {content['method'][:80]!r} cache, not {cls.name!r}: load it "
            "with the class of that method"
        )
    given = cls.Config, cls.needs_artifact, content["options"], changes
    options, hint = options_to_load(directory, *given)
    try:
        cache = cls(config, options)
    except (OSError, ValueError) as error:
        if not hint:
            raise
        raise ValueError(f"{hint} (without it: {error})") from error
    types = [layer["type"] for layer in content["layers"]]
    _check_model(directory, cache, content["model"], types)
    return cache, hint


def _check_overwrite(cache: FilledCache, directory: Path, overwrite: bool | None) -> None:
    """FileExistsError, or ValueError, where a save into ``directory`` would replace too much."""
    there = digest_of(directory)
    if there is None:
        return
    if not is_of_cache(directory):
        raise ValueError(
            f"{directory / DESCRIPTION} is not of a saved cache, or damaged, and would be "
            "replaced: give another folder, or remove it"
        )
    if overwrite or (overwrite is None and cache.saved_digests.get(_place(directory)) == there):
        return
    if overwrite is None:
        raise FileExistsError(
            f"{directory} holds a cache that another object saved: give another folder, or pass "
            "overwrite=True to replace it"
        )
    raise FileExistsError(f"{directory} holds a cache: give another folder, or leave out overwrite")


def note_saved(cache: FilledCache, directory: Path, digest: str) -> None:
    """Note that ``directory`` holds what ``cache`` wrote there, or was loaded from."""
    cache.saved_digests[_place(directory)] = digest


def _place(directory: Path) -> str:
    return os.path.realpath(directory)


def _check_model(
    directory: Path, cache: FilledCache, saved_shape: dict[str, Any], saved_types: list[str]
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


def _summary(types: list[str]) -> str:
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))
