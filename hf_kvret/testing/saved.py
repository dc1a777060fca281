"""Saved caches taken apart and put together again, as somebody who crafts one would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_kvret.io.description import DESCRIPTION, STEM, SUFFIX, checksum
from hf_kvret.io.tensor_file import version_of, write_tensors


def saved_file(folder: Path) -> Path:
    """The file of tensors that ``cache.json`` in ``folder`` names."""
    return folder / json.loads((folder / DESCRIPTION).read_text())["files"]["tensors"]


def read_saved(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``cache.json`` in ``folder``, and the tensors of the file that it names."""
    return json.loads((folder / DESCRIPTION).read_text()), load_file(saved_file(folder))


def write_saved(
    folder: Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a saved cache whose checksums are right, whatever it says.

    Args:
        folder: where to; made if needed.
        description: ``cache.json``; what it says of files and tensors is replaced with ``tensors``.
        tensors: None to leave files as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(description)
    if tensors is not None:
        unfinished = folder / "unfinished"
        with unfinished.open("wb") as file:
            entries = write_tensors(file, tensors)
        name = f"{STEM}-{version_of(entries)}{SUFFIX}"
        unfinished.replace(folder / name)
        content["files"] = {"tensors": name}
        content["tensors"] = {each: entry.to_json() for each, entry in entries.items()}
    content["checksum"] = checksum(content)
    (folder / DESCRIPTION).write_text(json.dumps(content))
