"""Folders: of artifacts, found and changed as damage would, and of models that are calibrated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_kvret.artifacts import files
from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.testing.tiny import spread_weights

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


def files_of(folder: Path) -> dict[str, bytes]:
    """What an artifact's folder holds, but its card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


def save_model(folder: Path, config: PreTrainedConfig) -> Path:
    """The folder with a random model and the tokenizer of the reference model."""
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL)
    config.vocab_size = len(tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    spread_weights(model, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_text(path: Path) -> Path:
    """A text of a hundred lines."""
    lines = [f"{n}. The river bends {n % 7} times before the mill." for n in range(100)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
