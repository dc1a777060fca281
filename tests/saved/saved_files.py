"""Saved caches taken apart and put together again, as somebody who crafts one would."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_kvret.saved import description, shards
from hf_kvret.saved.folder import SUFFIX

NAME = f"{description.STEM}-0123456789ab{SUFFIX}"
"""The file of tensors that ``write_saved`` writes."""


def saved_file(folder: Path) -> Path:
    """The first shard that ``cache.json`` in ``folder`` names."""
    return folder / json.loads((folder / description.DESCRIPTION).read_text())["files"][0]


def read_saved(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``cache.json`` in ``folder``, and the tensors of the shards that it names."""
    content = json.loads((folder / description.DESCRIPTION).read_text())
    tensors = {}
    for name in content["files"]:
        # Copies: a test may replace the file that is mapped.
        tensors |= {one: x.clone() for one, x in load_file(folder / name).items()}
    return content, tensors


def write_saved(
    folder: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write a saved cache whose checksums are right, whatever it says.

    Args:
        folder: where to; made if needed.
        content: ``cache.json``; what it says of files and tensors is replaced with ``tensors``.
        tensors: None to leave files as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = dict(content)
    if tensors is not None:
        tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(tensors, folder / NAME)
        content["files"] = [NAME]
        content["tensors"] = {name: shards.checksum(name, x) for name, x in tensors.items()}
    content["checksum"] = description.checksum(content)
    (folder / description.DESCRIPTION).write_text(json.dumps(content))


def file_at(address: int) -> str:
    """The file whose mapping holds ``address``; empty for other memory."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no /proc")
    for words in map(str.split, maps.read_text().splitlines()):
        first, last = (int(end, 16) for end in words[0].split("-"))
        if first <= address < last:
            return words[5] if len(words) > 5 else ""
    raise AssertionError("memory that is nowhere")
