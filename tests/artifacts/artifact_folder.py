"""Folders: of artifacts, found and changed as damage would, and of models that are calibrated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.saved.folder import digest_of_json
from hf_kvret.testing.models import spread_weights

DESCRIPTION, CARD = "config.json", "README.md"
FIXED_NAME = "artifact.safetensors"
"""The tensor file of artifacts that 0.1.0 put on the hub."""


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change ``config.json``; ``seal`` makes its checksum that of the change."""
    description = json.loads((folder / DESCRIPTION).read_text())
    change(description)
    if seal:
        description["description_sha256"] = digest_of_json(description, "description_sha256")
    (folder / DESCRIPTION).write_text(json.dumps(description))


def tensor_file(folder: Path) -> Path:
    """The only tensor file of an artifact."""
    (path,) = folder.glob("artifact*.safetensors")
    return path


def as_of_the_hub(folder: Path) -> None:
    """Give the tensors in ``folder`` the name that 0.1.0 gave them on the hub."""
    tensor_file(folder).rename(folder / FIXED_NAME)
    edit(folder, lambda description: description["files"].update(tensors=FIXED_NAME))


def files_of(folder: Path) -> dict[str, bytes]:
    """``config.json`` and the tensors of an artifact."""
    return {path.name: path.read_bytes() for path in (folder / DESCRIPTION, tensor_file(folder))}


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
