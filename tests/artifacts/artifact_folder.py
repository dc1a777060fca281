"""The files of an artifact, found, and changed as damage would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_kvret.artifacts import files

DESCRIPTION, CARD = "config.json", "README.md"


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change ``config.json``; ``seal`` makes its checksum that of the change."""
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description)
    if seal:
        description["description_sha256"] = files._digest(description)
    (folder / DESCRIPTION).write_text(json.dumps(description))


def tensor_file(folder: Path) -> Path:
    """The only tensor file of an artifact."""
    (path,) = folder.glob("artifact*.safetensors")
    return path
