"""Saving a filled cache and loading it again, also in another process.

A folder holds ``cache.json``, which says what the cache is, and a file of tensors that it names,
``layers.<number>.<part>``, with a checksum for every block; see docs/formats.md. Whatever is read
is checked before it is used, and nothing that a file says becomes code or the name of an attribute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.io import foreign_layers
from hf_kvret.io.agreement import check_agreement
from hf_kvret.io.description import (
    DESCRIPTION,
    OLD_TENSORS,
    STEM,
    SUFFIX,
    Description,
    LayerValues,
    digest_of,
    format_of,
    written,
)
from hf_kvret.io.folder import replacing
from hf_kvret.io.origin import ORIGIN_TENSORS, restore_origin, saved_origin
from hf_kvret.io.saved_options import options_to_load
from hf_kvret.io.tensor_file import DTYPES, TensorFile, version_of, write_tensors
from hf_kvret.models.ranks import check_save

if TYPE_CHECKING:
    from hf_kvret.cache import RetrievalCache

    CacheType = TypeVar("CacheType", bound=RetrievalCache)

MODEL_STATE = "model_state."
"""Begins the names of what the model keeps of the conversation, where it keeps any."""
# No other spelling of a number.
_OF_A_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\..")
_AGAIN = "save the cache again"


def save(cache: RetrievalCache, directory: Path, overwrite: bool | None) -> None:
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
        tensors: dict[str, torch.Tensor] = {}
        layers = []
        no_values: dict[str, Any] = {}
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, RetrievalLayer):
                parts, plain = layer.state_dict(), no_values
            else:
                parts, plain = foreign_layers.parts_of(layer)
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in parts.items()}
            layers.append(LayerValues(type(layer).__name__, plain))
        origin, more = saved_origin(cache)
        state = cache.model_state.state_dict(cache.get_seq_length())
        more |= {f"{MODEL_STATE}{name}": tensor for name, tensor in state.items()}
        with replacement.new_file() as file:
            entries = write_tensors(file, tensors | more)
        name = replacement.keep(file, version_of(entries), SUFFIX)
        options = dataclasses.asdict(cache.options_to_load())
        form = cache.name, cache.model_shape, options, layers
        # Of format 1 only: another file of that name is not ours.
        obsolete = [OLD_TENSORS] if format_of(directory) == 1 else []
        content = written(*form, entries, name, origin)
        digest = hashlib.sha256(content).hexdigest()
        try:
            replacement.commit(content, obsolete)
        finally:
            if digest_of(directory) == digest:
                note_saved(cache, directory, digest)


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
                cache = _load(cls, directory, description, config, device, changes)
            return cache, description.digest
        except FileNotFoundError:
            # Another process may have replaced the cache in the meantime.
            if digest_of(directory) == description.digest:
                raise


def _load(
    cls: type[CacheType],
    directory: Path,
    description: Description,
    config: PreTrainedConfig,
    device: torch.device,
    changes: dict[str, Any],
) -> CacheType:
    cache, hint = _empty_cache(cls, directory, description, config, changes)
    parts = read_parts(directory, description)
    layers = zip(cache.layers, description.layers, strict=True)
    for number, (layer, saved) in enumerate(layers):
        tensors = next(parts)
        try:
            if isinstance(layer, RetrievalLayer):
                layer.load_state_dict(tensors, device)
            else:
                foreign_layers.restore(layer, saved.values, tensors, device)
        except KeyError as missing:
            raise ValueError(
                f"{directory / description.file} has no layers.{number}.{missing.args[0]}: the "
                "file is damaged or from another version; save the cache again"
            ) from missing
        except ValueError as error:
            more = f"; {hint}" if hint else ""
            raise ValueError(f"{directory}: layer {number}: {error}{more}") from error
    text = config.get_text_config(decoder=True)
    check_agreement(directory, cache, getattr(text, "v_head_dim", None))
    tensors = next(parts)
    restore_origin(cache, description.origin, tensors, device)
    _restore_model_state(directory, cache, tensors, device)
    return cache


def _restore_model_state(
    directory: Path, cache: RetrievalCache, tensors: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Give ``cache`` what of ``tensors`` its model keeps; ValueError for what none does."""
    state = {
        name.removeprefix(MODEL_STATE): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_STATE)
    }
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
    description: Description,
    config: PreTrainedConfig,
    changes: dict[str, Any],
) -> tuple[CacheType, str]:
    """A new cache with the saved options and ``changes``, and the hint of ``options_to_load``."""
    if description.method != cls.name:
        raise ValueError(
            f"{directory} holds a {description.method[:80]!r} cache, not {cls.name!r}: load it "
            "with the class of that method"
        )
    given = cls.config_class, cls.needs_artifact, description.options, changes
    options, hint = options_to_load(directory, *given)
    try:
        cache = cls(config, options)
    except (OSError, ValueError) as error:
        if not hint:
            raise
        raise ValueError(f"{hint} (without it: {error})") from error
    types = [layer.type for layer in description.layers]
    _check_model(directory, cache, dict(description.model), types)
    return cache, hint


def read_parts(directory: Path, description: Description) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each layer, without their prefix, and at last those that are of no layer.

    Args:
        directory: of the cache.
        description: of it.

    Raises:
        FileNotFoundError: the file of tensors is missing.
        ValueError: it is damaged.
    """
    path = directory / description.file
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache in {directory}: {description.file} is missing")
    is_old = description.format_version == 1
    everything = _read_old(path, description) if is_old else {}
    groups: list[list[str]] = [[] for _ in range(len(description.layers) + 1)]
    origin = ORIGIN_TENSORS if description.origin["tokens"] is not None else ()
    for name in description.shapes:
        of_no_layer = name in origin or name.startswith(MODEL_STATE)
        groups[-1 if of_no_layer else _layer_of(name, len(description.layers))].append(name)
    prefixes = [f"layers.{number}." for number in range(len(description.layers))] + [""]
    if is_old:
        every = ({name: everything[name] for name in names} for names in groups)
        yield from _named(every, prefixes)
        return
    with TensorFile(path, description.tensors) as file:
        yield from _named(file.groups(groups), prefixes)


def _named(
    groups: Iterator[dict[str, torch.Tensor]], prefixes: list[str]
) -> Iterator[dict[str, torch.Tensor]]:
    for prefix, group in zip(prefixes, groups, strict=True):
        yield {name.removeprefix(prefix): tensor for name, tensor in group.items()}


def _layer_of(name: str, layers: int) -> int:
    """Number of the layer, of so many, that a tensor is of; ValueError for a name of none."""
    match = _OF_A_LAYER.match(name)
    if match is None or int(match[1]) >= layers:
        raise ValueError(f"there is a tensor {name[:80]!r}, which no save writes: {_AGAIN}")
    return int(match[1])


def _check_overwrite(cache: RetrievalCache, directory: Path, overwrite: bool | None) -> None:
    """FileExistsError, or ValueError, where a save into ``directory`` would replace too much."""
    there = digest_of(directory)
    if there is None:
        return
    if format_of(directory) is None:
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


def note_saved(cache: RetrievalCache, directory: Path, digest: str) -> None:
    """Note that ``directory`` holds what ``cache`` wrote there, or was loaded from."""
    cache.saved_digests[_place(directory)] = digest


def _place(directory: Path) -> str:
    return os.path.realpath(directory)


def _read_old(path: Path, description: Description) -> dict[str, torch.Tensor]:
    """The tensors of format 1."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            forms = {name: file.get_slice(name) for name in names}
            if {name: form.get_shape() for name, form in forms.items()} != description.shapes:
                raise ValueError(
                    f"{path} does not hold what {DESCRIPTION} says: the files are of different "
                    "caches or damaged; save the cache again"
                )
            strange = [name for name in names if forms[name].get_dtype() not in DTYPES]
            if strange:
                raise ValueError(
                    f"{path} has a tensor of dtype {forms[strange[0]].get_dtype()}, which no cache "
                    "has: it is damaged; save the cache again"
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is corrupt or truncated ({error}): save the cache again"
        ) from error
    return tensors


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


def _summary(types: list[str]) -> str:
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))
