"""The files of an artifact: tensors, ``config.json`` and ``README.md``.

``config.json`` names the tensor file, ``artifact-<version>.safetensors``, and replaces the older
one in one step, so that a save that breaks off leaves the old artifact. It has the sha256 of the
tensor file, and a checksum of its own. Artifacts of 0.1.0 on the hub have ``artifact.safetensors``.
huggingface_hub finds and downloads them, with its own settings and errors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load, save

from hf_kvret.saved.folder import VERSION_LEN, digest_of_json, read_object, replacing

FORMAT_VERSION = 1
DESCRIPTION, CARD = "config.json", "README.md"
TENSORS = ("artifact.safetensors", f"artifact-{'[0-9a-f]' * VERSION_LEN}.safetensors")
PATTERNS = (*TENSORS, DESCRIPTION, CARD)
"""Names of an artifact's files, as the hub's client takes them."""

_CHECKSUM = "description_sha256"
_AGAIN = "save or download the artifact again (git lfs pull, where git left pointers)"


def check_no_foreign_artifact(directory: Path, method: str, repository: str = "") -> None:
    """Refuse a folder where an artifact of ``method`` would overwrite foreign files.

    A new folder is fine, and so is one with an older artifact of the same method. The folder may be
    a copy of a ``repository``.

    Raises:
        ValueError: ``config.json`` there is of a model, or of anything else than an artifact; of
            another method; or a ``README.md`` is there without one.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        path = directory / CARD
        if not path.exists():
            return
    description, _ = read_object(path, "format_version")
    if "method" not in description:
        owner = "not of a calibration artifact (but of a model, perhaps)"
    elif description["method"] != method:
        owner = f"of an artifact of {description['method']!r}, not of {method!r}"
    else:
        return
    place = f"{path.name} of {repository}" if repository else path
    way_out = f"repository, for instance USER/MODEL-{method}"
    if not repository:
        way_out = f"folder, for instance MODEL/{method}"
    raise ValueError(f"{place} is {owner}, and would be replaced: give a new {way_out}")


def write_folder(
    directory: Path, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], card: str
) -> None:
    """Write the three files to ``directory``, which is made if needed.

    Errors as of ``CalibrationArtifact.save_pretrained``.

    Args:
        directory: where to.
        description: plain JSON with ``method``; the format version, the list of tensors and the
            checksums are added.
        tensors: on any device, of any layout.
        card: text of the model card.
    """
    check_no_foreign_artifact(directory, description["method"])
    # Copies, because safetensors takes no shared memory.
    content = save({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    with replacing(directory, DESCRIPTION, "artifact") as new:
        full = {
            "format_version": FORMAT_VERSION,
            **description,
            "tensors": {
                name: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
                for name, x in sorted(tensors.items())
            },
            "files": {"tensors": new.keep(content, digest[:VERSION_LEN])},
            "tensors_sha256": digest,
        }
        full[_CHECKSUM] = digest_of_json(full, _CHECKSUM)
        new.put_beside(CARD, card.encode())
        new.commit((json.dumps(full, indent=1, allow_nan=False) + "\n").encode())


def read_description(directory: Path) -> dict[str, Any]:
    """``config.json`` of the artifact in ``directory``, whole and of a version we read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: no JSON, of no artifact, another format version, a wrong checksum.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(
            f"no calibration artifact in {directory}: {DESCRIPTION} is missing; give a folder that "
            "CalibrationArtifact.save_pretrained wrote, or the hub id of one"
        )
    description, fault = read_object(path, "format_version")
    if fault:
        raise ValueError(
            f"{path} is {fault}; it is damaged, or not of a calibration artifact (but of a model, "
            f"perhaps): {_AGAIN}"
        )
    version = description["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}, this hf-kvret reads {FORMAT_VERSION}: "
            "calibrate again, or upgrade hf-kvret (git pull, then pip install -c constraints.txt .)"
        )
    if description.get(_CHECKSUM) != digest_of_json(description, _CHECKSUM):
        raise ValueError(f"{path} was changed (its sha256 is not the one that it says): {_AGAIN}")
    return description


def read_tensors(directory: Path, description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the artifact in ``directory``, on the CPU.

    Raises:
        FileNotFoundError: there is no tensor file.
        ValueError: it is damaged, or belongs to another ``config.json``.
    """
    name = description["files"]["tensors"]
    if not any(fnmatchcase(name, pattern) for pattern in TENSORS):
        raise ValueError(f"{directory / DESCRIPTION} names {name!r} as its tensor file: {_AGAIN}")
    path = directory / name
    if not path.is_file():
        raise FileNotFoundError(f"no calibration artifact in {directory}: {name} is missing")
    # The file is read once, so that what is hashed is used, whatever happens to it meanwhile.
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != description["tensors_sha256"]:
        raise ValueError(
            f"{path} is damaged, or of another artifact than {DESCRIPTION} (its sha256 is not the "
            f"one there): {_AGAIN}"
        )
    return load(content)


# The base class of the HTTP client's errors without a response; the client differs by version.
CLIENT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


def find_folder(source: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder with the files of ``source``: itself if it exists, else downloaded or cached.

    All files are of one commit, and those that are in the cache are not downloaded again. A file
    that the repository lacks is missing in the folder. Other arguments and errors as of
    ``CalibrationArtifact.from_pretrained``.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} of {path}, a folder on this machine: only artifacts on the "
                "hub have revisions; leave it out, or start where no folder has the hub id's name"
            )
        return path
    if path.exists():
        raise NotADirectoryError(f"{path} is a file: give the folder that holds the artifact")
    if not isinstance(source, str) or not is_hub_id(source):
        raise FileNotFoundError(
            f"no folder {path}, and it is no hub id either (a string, user/name): check the "
            "spelling"
        )
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(PATTERNS)))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no folder {path}, and as a hub id: {error}") from error


def is_hub_id(text: str) -> bool:
    """Whether ``text`` could be the name of a repository: ``user/name``, or an old ``name``."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
