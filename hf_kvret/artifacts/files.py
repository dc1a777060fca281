"""The files of an artifact: tensors, ``config.json`` and ``README.md``.

``config.json`` names the tensor file, ``artifact-<version>.safetensors``, and replaces the older
one in one step, so that a save that breaks off leaves the old artifact. It lists name, shape and
dtype of every tensor and the sha256 of their file, and has a checksum of its own. On the hub, where
a commit is one step, the tensor file is ``artifact.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hf_kvret.saved.folder import VERSION_LEN, replacing
from hf_kvret.saved.strict_json import plain_bytes, read_json

FORMAT_VERSION = 1
TENSORS, DESCRIPTION, CARD = "artifact.safetensors", "config.json", "README.md"
HUB_FILES = (TENSORS, DESCRIPTION, CARD)
PATTERNS = (TENSORS, "artifact-*.safetensors", DESCRIPTION, CARD)
"""Names of an artifact's files, as the hub's client takes them."""

_STEM = "artifact"
_SUFFIX = ".safetensors"
_VERSIONED = re.compile(rf"{_STEM}-[0-9a-f]{{{VERSION_LEN}}}{re.escape(_SUFFIX)}")

_AGAIN = "save or download the artifact again"
_TYPES = {
    "method": str,
    "model": dict,
    "data": dict,
    "options": dict,
    "quality": list,
    "tensors": dict,
    "tensors_sha256": str,
    "files": dict,
    "description_sha256": str,
}
_LFS_POINTER = b"version https://git-lfs"


def check_no_foreign_artifact(directory: Path, method: str) -> None:
    """Refuse a folder where an artifact of ``method`` would overwrite foreign files.

    A new folder is fine, and so is one with an older artifact of the same method. Files with the
    names of an artifact's but without its ``config.json`` are foreign.

    Raises:
        FileExistsError: ``directory`` is a file.
        ValueError: as ``check_description``; a file that would be replaced is of no artifact.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: give a folder")
    path = directory / DESCRIPTION
    way_out = f"give a new folder, for instance MODEL/{method}"
    if path.is_file():
        check_description(path.read_bytes(), method, str(path), way_out)
        return
    for name in (TENSORS, CARD):
        if (directory / name).exists():
            raise ValueError(
                f"{directory / name} is of no artifact (there is no {DESCRIPTION} beside it), and "
                f"would be replaced: {way_out}"
            )


def check_description(content: bytes, method: str, path: str, way_out: str) -> None:
    """Refuse a ``config.json`` at ``path`` whose ``content`` is not of a ``method`` artifact.

    Raises:
        ValueError: it is of a model, or of anything else than an artifact; of another method.
    """
    try:
        description = read_json(content)
    except ValueError:
        description = None
    if not isinstance(description, dict) or not {"format_version", "method"} <= description.keys():
        owner = "not of a calibration artifact (but of a model, perhaps)"
    elif description["method"] != method:
        owner = f"of an artifact of {description['method']!r}, not of {method!r}"
    else:
        return
    raise ValueError(f"{path} is {owner}, and would be replaced: {way_out}")


def write_folder(
    directory: Path, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], card: str
) -> None:
    """Write the three files to ``directory``, which is made if needed.

    Errors as of ``CalibrationArtifact.save_pretrained``.

    Args:
        description: plain JSON with ``method``; the format version, the list of tensors and the
            checksums are added.
        tensors: on any device, of any layout.
        card: text of the model card.
    """
    check_no_foreign_artifact(directory, description["method"])
    content, digest = _content(tensors)
    with replacing(directory, DESCRIPTION, _STEM) as new:
        name = new.keep(content, digest[:VERSION_LEN], _SUFFIX)
        new.put_beside(CARD, card.encode())
        obsolete = [TENSORS] if _names_fixed_file(directory) else []
        new.commit(_description_text(description, tensors, name, digest), obsolete)


def write_for_hub(
    directory: Path, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], card: str
) -> None:
    """Write the three files for a commit to the hub; arguments as of ``write_folder``."""
    content, digest = _content(tensors)
    (directory / TENSORS).write_bytes(content)
    text = _description_text(description, tensors, TENSORS, digest)
    (directory / DESCRIPTION).write_bytes(text)
    (directory / CARD).write_text(card, encoding="utf-8")


def read_description(directory: Path) -> dict[str, Any]:
    """``config.json`` of the artifact in ``directory``, complete and of a version we read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no JSON, a part is missing or of another kind, another format version.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(
            f"no calibration artifact in {directory}: {DESCRIPTION} is missing; give a folder that "
            "CalibrationArtifact.save_pretrained wrote, or the hub id of one"
        )
    try:
        description = read_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): {_AGAIN}") from error
    if not isinstance(description, dict) or "format_version" not in description:
        raise ValueError(
            f"{path} has no 'format_version': it is not of a calibration artifact (but of a model, "
            f"perhaps), or damaged; {_AGAIN}"
        )
    version = description["format_version"]
    if version != FORMAT_VERSION or type(version) is not int:
        raise ValueError(
            f"{path} has format version {version!r}, this hf-kvret reads {FORMAT_VERSION}: "
            "calibrate again, or upgrade hf-kvret (git pull, then pip install -c constraints.txt .)"
        )
    for name, cls in _TYPES.items():
        if name not in description:
            raise ValueError(f"{path} has no {name!r}: it is damaged; {_AGAIN}")
        if not isinstance(description[name], cls):
            raise ValueError(
                f"{path} has a {type(description[name]).__name__} for {name!r} where a "
                f"{cls.__name__} belongs: it is damaged; {_AGAIN}"
            )
    if description["description_sha256"] != _digest(description):
        raise ValueError(f"{path} was changed (its sha256 is not the one that it says): {_AGAIN}")
    return description


def read_tensors(directory: Path, description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the artifact in ``directory``, on the CPU, checked against ``description``.

    Raises:
        FileNotFoundError: there is no tensor file.
        ValueError: it is damaged, holds other tensors, or belongs to another ``config.json``.
    """
    path = directory / _tensor_file(directory, description)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration artifact in {directory}: {path.name} is missing")
    # The file is read once, so that what is hashed is used, whatever happens to it meanwhile.
    content = path.read_bytes()
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        is_pointer = content.startswith(_LFS_POINTER)
        way_out = "it is a git-lfs pointer, run git lfs pull" if is_pointer else _AGAIN
        raise ValueError(f"{path} is corrupt or truncated ({error}): {way_out}") from error
    own_list, saved_list = _list(tensors), description["tensors"]
    for name in [*saved_list, *(name for name in own_list if name not in saved_list)]:
        if own_list.get(name) != saved_list.get(name):
            own, saved = _in_words(own_list.get(name)), _in_words(saved_list.get(name))
            raise ValueError(
                f"{path} does not hold what {DESCRIPTION} says: {name} is {own} instead of "
                f"{saved}; {_AGAIN}"
            )
    if hashlib.sha256(content).hexdigest() != description["tensors_sha256"]:
        raise ValueError(
            f"{path} and {DESCRIPTION} are of different artifacts, or the file was changed "
            f"(its sha256 is not the one in {DESCRIPTION}): {_AGAIN}"
        )
    return tensors


def _content(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, str]:
    """The tensor file and its sha256; copies, because safetensors takes no shared memory."""
    content = save({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()})
    return content, hashlib.sha256(content).hexdigest()


def _list(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in sorted(tensors.items())
    }


def _in_words(entry: Any) -> str:
    if entry is None:
        return "absent"
    if isinstance(entry, dict) and {"shape", "dtype"} <= entry.keys():
        return f"{entry['dtype']} {entry['shape']}"
    return repr(entry)


def _description_text(
    description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str, digest: str
) -> bytes:
    """``config.json``: ``description``, the list of tensors, and checksums."""
    full = {
        "format_version": FORMAT_VERSION,
        **description,
        "tensors": _list(tensors),
        "files": {"tensors": file},
        "tensors_sha256": digest,
    }
    full["description_sha256"] = _digest(full)
    return (json.dumps(full, indent=1, allow_nan=False) + "\n").encode()


def _digest(description: Mapping[str, Any]) -> str:
    """The digest of all that a description says but this digest, however it is written down."""
    fields = {name: value for name, value in description.items() if name != "description_sha256"}
    return hashlib.sha256(plain_bytes(fields)).hexdigest()


def _names_fixed_file(directory: Path) -> bool:
    """Whether the artifact there, of the hub perhaps, has its tensors in ``TENSORS``.

    One that can't be read has none.
    """
    try:
        return _tensor_file(directory, read_description(directory)) == TENSORS
    except (FileNotFoundError, ValueError):
        return False


def _tensor_file(directory: Path, description: Mapping[str, Any]) -> str:
    """Name of the tensor file; ValueError for one that can't be of an artifact."""
    name = description["files"].get("tensors")
    if not isinstance(name, str) or not (name == TENSORS or _VERSIONED.fullmatch(name)):
        raise ValueError(
            f"{directory / DESCRIPTION} names {name!r} as its tensor file: it is damaged; {_AGAIN}"
        )
    return name
