"""The files of an artifact: ``artifact.safetensors``, ``config.json`` and ``README.md``.

``config.json`` lists name, shape and dtype of every tensor and the sha256 of the tensor file, so
that a folder with parts of two artifacts is found out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT_VERSION = 1
TENSORS, DESCRIPTION, CARD = "artifact.safetensors", "config.json", "README.md"
FILES = (TENSORS, DESCRIPTION, CARD)

_AGAIN = "save or download the artifact again"
_KINDS = {
    "method": str,
    "model": dict,
    "data": dict,
    "options": dict,
    "quality": list,
    "tensors": dict,
    "tensors_sha256": str,
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


def check_description(content: bytes, method: str, place: str, way_out: str) -> None:
    """Refuse a ``config.json`` at ``place`` whose ``content`` is not of a ``method`` artifact.

    Raises:
        ValueError: it is of a model, or of anything else than an artifact; of another method.
    """
    try:
        description = json.loads(content)
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict) or not {"format_version", "method"} <= description.keys():
        owner = "not of a calibration artifact (but of a model, perhaps)"
    elif description["method"] != method:
        owner = f"of an artifact of {description['method']!r}, not of {method!r}"
    else:
        return
    raise ValueError(f"{place} is {owner}, and would be replaced: {way_out}")


def write_folder(
    directory: Path, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], card: str
) -> None:
    """Write the three files to ``directory``, which is made if needed.

    They are written to a temporary folder inside it and then moved, so an interruption leaves the
    old files. An interruption between two moves leaves a mixture, which ``read_tensors`` refuses.
    Other files of the directory stay.

    Args:
        directory: where to.
        description: plain JSON with ``method``; the format version and the list of tensors are
            added.
        tensors: on any device, of any layout.
        card: text of the model card.

    Raises:
        FileExistsError, NotADirectoryError: ``directory``, or a part of it, is a file.
        ValueError: ``config.json`` there is not of an artifact of this method.
    """
    check_no_foreign_artifact(directory, description["method"])
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".unfinished-") as name:
        folder = Path(name)
        save_file(_contiguous(tensors), folder / TENSORS)
        full = {
            "format_version": FORMAT_VERSION,
            **description,
            "tensors": _list(tensors),
            "tensors_sha256": _sha256(folder / TENSORS),
        }
        text = json.dumps(full, indent=1, allow_nan=False) + "\n"
        (folder / DESCRIPTION).write_text(text, encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")
        # safetensors makes files that only their owner can read.
        shutil.copymode(folder / CARD, folder / TENSORS)
        for file in FILES:
            os.replace(folder / file, directory / file)


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
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): {_AGAIN}") from error
    if not isinstance(description, dict) or "format_version" not in description:
        raise ValueError(
            f"{path} has no 'format_version': it is not of a calibration artifact (but of a model, "
            f"perhaps), or damaged; {_AGAIN}"
        )
    version = description["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}, this hf-kvret reads {FORMAT_VERSION}: upgrade "
            "hf-kvret (git pull, then pip install -c constraints.txt .), or calibrate again"
        )
    for name, kind in _KINDS.items():
        if name not in description:
            raise ValueError(f"{path} has no {name!r}: it is damaged; {_AGAIN}")
        if not isinstance(description[name], kind):
            raise ValueError(
                f"{path} has a {type(description[name]).__name__} for {name!r} where a "
                f"{kind.__name__} belongs: it is damaged; {_AGAIN}"
            )
    return description


def read_tensors(directory: Path, description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the artifact in ``directory``, on the CPU, checked against ``description``.

    Raises:
        FileNotFoundError: there is no tensor file.
        ValueError: it is damaged, holds other tensors, or belongs to another ``config.json``.
    """
    path = directory / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"no calibration artifact in {directory}: {TENSORS} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        way_out = "it is a git-lfs pointer, run git lfs pull" if is_pointer else _AGAIN
        raise ValueError(f"{path} is corrupt or truncated ({error}): {way_out}") from error
    own_list, saved_list = _list(tensors), description["tensors"]
    for name in [*saved_list, *(name for name in own_list if name not in saved_list)]:
        if own_list.get(name) != saved_list.get(name):
            raise ValueError(
                f"{path} does not hold what {DESCRIPTION} says: {name} is "
                f"{_tell(own_list.get(name))} instead of {_tell(saved_list.get(name))}; {_AGAIN}"
            )
    if _sha256(path) != description["tensors_sha256"]:
        raise ValueError(
            f"{path} and {DESCRIPTION} are of different artifacts, or the file was changed "
            f"(its sha256 is not the one in {DESCRIPTION}): {_AGAIN}"
        )
    return tensors


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous CPU tensors, each with its own storage, as safetensors requires."""
    result: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _list(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in sorted(tensors.items())
    }


def _tell(entry: Any) -> str:
    if entry is None:
        return "absent"
    if isinstance(entry, dict) and {"shape", "dtype"} <= entry.keys():
        return f"{entry['dtype']} {entry['shape']}"
    return repr(entry)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
