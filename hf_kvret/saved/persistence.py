"""Saving a filled cache and loading it again, also in another process.

A folder holds ``cache.json``, which says what the cache is, and the shards of tensors that it
names; see docs/formats.md. What is read is compared with its checksum, and nothing that a file says
becomes code or the name of an attribute.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.contracts.state import Tensors
from hf_kvret.layer import foreign_layers
from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.ranks import part_of
from hf_kvret.options.config import RetrievalConfig, check_load
from hf_kvret.saved.description import (
    DESCRIPTION,
    STEM,
    check_replaceable,
    digest_of,
    encoded,
    read_description,
)
from hf_kvret.saved.folder import Replacement, replacing
from hf_kvret.saved.identity import CacheIdentity, facts_difference
from hf_kvret.saved.shards import SavedTensors, ShardWriter
from hf_kvret.saved.token_record import InputDigest
from hf_kvret.stores import DISK
from hf_kvret.stores.memory import CPU

_log = logging.getLogger(__name__)

_LEAST_MAPPED = 256 << 20


# A ``RetrievalCache``, whose module imports this one.
FilledCache: TypeAlias = Any


def save(cache: FilledCache, directory: Path) -> None:
    """Write ``cache`` to ``directory``; see ``save_pretrained``.

    Raises:
        TypeError: a cache layer of transformers that is not known.
        ValueError: ``cache.json`` there is not of a cache.
    """
    # Numbers are on the CPU also where another default device was set; as in `load`.
    with torch.device("cpu"), replacing(directory, DESCRIPTION, STEM) as replacement:
        check_replaceable(directory)
        replacement.commit(encoded(_write(cache, replacement)))


def _write(cache: FilledCache, replacement: Replacement) -> dict[str, Any]:
    """Write the tensors of ``cache``; returns the content of its ``cache.json``."""
    writer, layers, foreign = ShardWriter(replacement), [], foreign_layers_of(cache.layers)
    for number, layer in enumerate(cache.layers):
        tensors: Tensors = {}
        values: dict[str, Any] = {}
        if isinstance(layer, RetrievalLayer):
            tensors = layer.state_dict()
        if number in foreign:
            more, values = foreign_layers.layer_state(foreign[number])
            tensors |= {name: x.cpu().contiguous() for name, x in more.items()}
        writer.add(f"layers.{number}.", tensors)
        layers.append({"type": type(layer).__name__, "values": values})
    saved = {name: state.state_dict() for name, state in cache.states.items()}
    for name, tensors in saved.items():
        writer.add(f"{name}.", {key: x.detach().cpu() for key, x in tensors.items()})
    writer.finish()
    return {
        "method": cache.name,
        "model": cache.model_shape,
        "options": dataclasses.asdict(cache.options_to_load()),
        "identity": None if cache.identity is None else dataclasses.asdict(cache.identity),
        "tokens": {"passes": cache.tokens.passes} if saved["tokens"] else None,
        "layers": layers,
        "snapshots": cache.snapshots.described(),
        "files": writer.files,
        "tensors": writer.checksums,
    }


def load(
    cls: type[FilledCache],
    directory: Path,
    config: PreTrainedConfig,
    device: torch.device,
    model: PreTrainedModel | None,
    changes: dict[str, Any],
    mapped: bool | str,
) -> FilledCache:
    """The cache in ``directory``; see ``from_pretrained``."""
    if model is not None and not part_of(model).is_whole:
        raise ValueError(
            "the model is split over processes, and a saved cache has all heads: read the prompt "
            "in each process"
        )
    digest = digest_of(directory)
    content = read_description(directory)
    paths = [directory / name for name in content["files"]]
    try:
        with torch.device("cpu"):
            cache = _empty_cache(cls, directory, content, config, changes)
            is_mapped = _is_mapped(mapped, paths, CPU if cache.options.store == DISK else device)
            tensors = SavedTensors(paths, content["tensors"], is_mapped, device.type == "cpu")
            _fill(cache, directory, content, tensors, device)
    except (OSError, RuntimeError):
        # A save to this folder may have removed files that were still to be read.
        if digest_of(directory) == digest:
            raise
        return load(cls, directory, config, device, model, changes, mapped)
    if model is not None and cache.identity is not None:
        cache.check_model(model, f"the cache in {directory}")
    return cache


def _is_mapped(mapped: bool | str, paths: list[Path], reader: torch.device) -> bool:
    """Whether rows, to which ``reader`` attends, stay in their files ``paths``.

    ValueError for another word than ``"auto"``.
    """
    if mapped not in (True, False, "auto"):
        raise ValueError(f"mapped={mapped!r}: pass True, False or 'auto'")
    if mapped != "auto":
        return bool(mapped)
    nbytes = sum(path.stat().st_size for path in paths if path.is_file())
    return reader.type == "cpu" and nbytes > _LEAST_MAPPED


def _fill(
    cache: FilledCache,
    directory: Path,
    content: Mapping[str, Any],
    tensors: SavedTensors,
    device: torch.device,
) -> None:
    """Give a new ``cache`` what is saved; a warning tells of a model that is not known."""
    foreign = foreign_layers_of(cache.layers)
    for number, layer in enumerate(cache.layers):
        values = content["layers"][number]["values"]
        state = tensors.with_prefix(f"layers.{number}.")
        try:
            if isinstance(layer, RetrievalLayer):
                layer.load_state_dict(state, device)
            if number in foreign:
                foreign_layers.restore(foreign[number], values, state, device)
        except KeyError as missing:
            raise ValueError(
                f"{directory} has no layers.{number}.{missing.args[0]}: it is damaged or from "
                "another version; save the cache again"
            ) from missing
        except ValueError as error:
            raise ValueError(f"{directory}: layer {number}: {error}") from error
    if (fault := cache.stack.fault()) is not None:
        raise ValueError(f"{directory} is damaged: {fault}; save the cache again")
    for name, state in cache.states.items():
        if state is not cache.snapshots:
            state.load_state_dict(tensors.with_prefix(f"{name}."), device)
    if content["tokens"] is not None:
        cache.tokens.passes = [InputDigest(*one) for one in content["tokens"]["passes"]]
    cache.snapshots.load(content["snapshots"], tensors.with_prefix("snapshots."))
    cache.snapshots.trim(cache.options.snapshots)
    identity = content["identity"]
    cache.identity = None if identity is None else CacheIdentity(**identity)
    if cache.get_seq_length() and identity is None:
        _log.warning(
            "the saved cache does not say which model filled it, so no model is compared with it: "
            "a wrong one gives wrong tokens. Save it with save_pretrained(..., model=model)"
        )


def _empty_cache(
    cls: type[FilledCache],
    directory: Path,
    content: Mapping[str, Any],
    config: PreTrainedConfig,
    changes: dict[str, Any],
) -> FilledCache:
    """A new cache with the saved options and ``changes``."""
    if content["method"] != (name := getattr(cls, "name", None)):
        raise ValueError(
            f"{directory} holds a {content['method']!r} cache, not {name!r}: load it "
            "with the class of that method"
        )
    options, hint = _options_to_load(cls, directory, content["options"], changes)
    try:
        cache = cls(config, options)
    except (OSError, ValueError) as error:
        if not hint:
            raise
        raise ValueError(f"{hint} (without it: {error})") from error
    types = [layer["type"] for layer in content["layers"]]
    shape = {**cache.model_shape, "layers": [type(layer).__name__ for layer in cache.layers]}
    if why := facts_difference({**content["model"], "layers": types}, shape):
        raise ValueError(f"{directory} was saved from another model: {why}")
    return cache


def _options_to_load(
    cls: type[FilledCache], directory: Path, saved: Mapping[str, Any], changes: dict[str, Any]
) -> tuple[RetrievalConfig, str]:
    """The saved options with ``changes``; and what to tell where the model's artifact won't do.

    That is empty where the caller names the artifact, or none was saved. The artifacts that a file
    names are not followed: whoever writes a file could otherwise have any folder read, or any
    repository of the hub downloaded. The caller names one, or it lies beside the model, where a new
    cache looks too.

    Raises:
        ValueError: options that this version hasn't, or a change that a filled cache can't take.
    """
    check_load(changes, cls.needs_artifact)
    gone = cls.Config.gone.items()
    try:
        options = cls.Config.from_options(**{k: x for k, x in saved.items() if (k, x) not in gone})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{directory} has options that this hf_kvret does not take ({error}): fill a new cache"
        ) from error
    if options.disk is not None:
        # A file must not say where others are written.
        raise ValueError(f"{directory} has the option disk, which no save writes")
    hint = ""
    name = getattr(options, "artifact", None) if cls.needs_artifact else None
    if name is not None and "artifact" not in changes:
        hint = (
            f"{directory} was saved with artifact={name[:200]!r}, and what a file names is not "
            "followed: pass artifact= to from_pretrained, with this name if you trust it"
        )
        changes = {"artifact": None, **changes}
    if "artifact" in changes:
        # The saved revision is that of the artifact that is replaced.
        changes = {"revision": None, **changes}
    return options.replace(**changes), hint
