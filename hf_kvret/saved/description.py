"""``cache.json``: what a saved cache is, and which files hold it. See docs/formats.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_kvret.saved.folder import SUFFIX, VERSION_LEN, digest_of_json, read_object
from hf_kvret.saved.shards import SavedTensors
from hf_kvret.version import __version__

# Those before did not know all that makes a model another one.
FORMAT_VERSION = 3
DESCRIPTION, STEM = "cache.json", "cache"

_AGAIN = "save the cache again"
_FILE = re.compile(rf"{STEM}-[0-9a-f]{{{VERSION_LEN}}}{re.escape(SUFFIX)}")


def read_description(directory: Path) -> dict[str, Any]:
    """``cache.json`` of the cache saved in ``directory``, compared with its checksum.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another format.
    """
    path = directory / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache in {directory}: {DESCRIPTION} is missing")
    content, fault = read_object(path, "format_version")
    if fault:
        raise ValueError(f"{path} is corrupt ({fault}): {_AGAIN}")
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {content['format_version']}, this hf_kvret reads "
            f"{FORMAT_VERSION}: {_AGAIN}"
        )
    if content.get("checksum") != checksum(content):
        raise ValueError(f"{path} is corrupt (its checksum is another one): {_AGAIN}")
    if not all(_FILE.fullmatch(name) for name in content["files"]):
        # No other file is opened, whoever wrote the names.
        raise ValueError(f"{path} names files that are not of tensors: {_AGAIN}")
    return content


def encoded(content: Mapping[str, Any]) -> bytes:
    """``cache.json`` with ``content``, the format, our versions, and a checksum."""
    versions = {
        "hf_kvret": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    content = {"format_version": FORMAT_VERSION, "library": versions, **content}
    return json.dumps(content | {"checksum": checksum(content)}, indent=1).encode() + b"\n"


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the values of a description but ``checksum``."""
    return digest_of_json(content, "checksum")


def digest_of(directory: Path) -> str | None:
    """SHA-256 of ``cache.json`` in ``directory``; None where there is none."""
    path = directory / DESCRIPTION
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def check_replaceable(directory: Path) -> None:
    """ValueError for a ``cache.json`` in ``directory`` that is of no saved cache."""
    path = directory / DESCRIPTION
    if not path.is_file():
        return
    content, _ = read_object(path, "format_version")
    if not {"method", "layers"} <= content.keys():
        raise ValueError(
            f"{path} is not of a saved cache, or damaged, and would be replaced: give another "
            "folder, or remove it"
        )


def verify_cache(directory: Path) -> list[str]:
    """Lines that say what was checked: every byte, by its checksum.

    Whether tensors fit one another and the model shows when the cache is loaded.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage; the message says where.
    """
    content = read_description(directory)
    tensors = SavedTensors([directory / name for name in content["files"]], content["tensors"])
    names = tensors.names()
    nbytes = sum(tensors.read(name).nbytes for name in names)
    versions = [f"{name} {value}" for name, value in content["library"].items()]
    return [
        f"cache    {content['method']}, format {FORMAT_VERSION}, {len(content['layers'])} layers",
        f"tensors  {len(names)}, {nbytes / 2**20:.2f} MiB: whole",
        f"made by  {', '.join(versions)}",
    ]
