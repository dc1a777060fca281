"""What was saved, for people: an artifact as text and a table, and whether files are whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved import description as caches
from hf_kvret.saved.identity import printable


def describe(artifact: CalibrationArtifact) -> str:
    """Method, model, data, options, sizes and digest."""
    model = artifact.model
    options = {name: value for name, value in artifact.options.items() if name != "layers"}
    layers = f", {len(artifact.quality)} layers" if artifact.quality else ""
    return "\n".join(
        printable(line)
        for line in [
            f"method   {artifact.method}{layers}",
            f"model    {model.name} ({model.facts.get('model_type')}, {model.sha256[:12]})",
            f"data     {_list(artifact.data)}",
            f"options  {_list(options)}",
            f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB",
            f"sha256   {artifact.sha256}",
        ]
    )


def quality_table(artifact: CalibrationArtifact) -> str:
    """A markdown table of the figures of quality, a line for each layer; a sentence for none."""
    if not artifact.quality:
        return "no figures of quality"
    names = list(dict.fromkeys(name for row in artifact.quality for name in row))
    rows = [[_cell(row.get(name)) for name in names] for row in artifact.quality]
    return markdown_table([name.replace("_", " ") for name in names], rows)


def verify(path: Path) -> list[str]:
    """Lines that say which cache and artifact the folder ``path`` holds, and what was checked.

    Every checksum is. Whether they fit a model shows when they are loaded.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or nothing that can be verified.
    """
    lines = caches.verify_cache(path) if (path / caches.DESCRIPTION).exists() else []
    if _holds_artifact(path):
        artifact = CalibrationArtifact.from_pretrained(path)
        lines += [
            f"artifact {artifact.method} of {artifact.model.name}",
            f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB: whole",
            f"sha256   {artifact.sha256}",
        ]
    if not lines:
        raise ValueError(f"{path}: --verify checks folders with saved caches and artifacts")
    return [printable(line) for line in lines]


def _holds_artifact(path: Path) -> bool:
    """Whether an artifact, damaged perhaps, seems to be in ``path``.

    ``config.json`` is also what transformers calls the configuration of a model.
    """
    file = path / DESCRIPTION
    content = file.read_bytes() if file.is_file() else b""
    return b'"format_version"' in content or (file.exists() and b'"model_type"' not in content)


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
