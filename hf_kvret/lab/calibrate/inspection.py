"""Artifacts for people: text, a table and a picture of one, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.artifacts.files import DESCRIPTION, read_description
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.methods.a2ats import learned as a2ats
from hf_kvret.methods.aqua import learned as aqua
from hf_kvret.saved.identity import printable
from hf_kvret.saved.strict_json import read_json

_METHODS = {method.METHOD: method.check_whole for method in (a2ats, aqua)}


def describe(artifact: CalibrationArtifact, *, as_json: bool = False) -> str:
    """Method, model, data, options and sizes; ``as_json`` with quality, as one JSON object."""
    model = artifact.model
    sizes = {
        name: {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
        for name, x in sorted(artifact.tensors.items())
    }
    options = {name: value for name, value in artifact.options.items() if name != "layers"}
    if as_json:
        whole = {
            "method": artifact.method,
            "model": model.as_json(),
            "data": dict(artifact.data),
            "options": dict(artifact.options),
            "quality": list(artifact.quality),
            "tensors": sizes,
            "bytes": artifact.nbytes,
            "sha256": artifact.sha256,
        }
        return json.dumps(whole, indent=1)
    layers = f", {len(artifact.quality)} layers" if artifact.quality else ""
    return "\n".join(
        printable(line)
        for line in [
            f"method   {artifact.method}{layers}",
            f"model    {model.name} ({model.facts.get('model_type')}, {model.sha256[:12]})",
            f"data     {_list(artifact.data)}",
            f"options  {_list(options)}",
            f"tensors  {len(sizes)}, {artifact.nbytes / 2**20:.2f} MiB",
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


def plot_quality(path: Path, artifact: CalibrationArtifact) -> None:
    """Draw all figures that are shares or errors against the layer.

    Raises:
        ValueError: the artifact has none.
    """
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in artifact.quality:
        for name, value in row.items():
            if isinstance(value, float):
                xs, ys = lines.setdefault(name.replace("_", " "), ([], []))
                xs.append(float(row["layer"]))
                ys.append(value)
    if not lines:
        raise ValueError("--plot: this artifact has no figures of quality; leave the option out")
    title = f"{artifact.method} of {artifact.model.name}"
    plot_lines(path, lines, title=title, x="layer", y="share", whole_x=True, low=0.0)


def holds_artifact(path: Path) -> bool:
    """Whether an artifact, damaged perhaps, seems to be in ``path``.

    ``config.json`` is also what transformers calls the configuration of a model.
    """
    file = path / DESCRIPTION
    if not file.is_file():
        return file.exists()
    try:
        content = read_json(file.read_bytes())
    except (OSError, ValueError):
        return True
    is_a_models = isinstance(content, dict) and isinstance(content.get("model_type"), str)
    return not is_a_models or "format_version" in content


def files_of_artifact(path: Path) -> set[str]:
    """Names of the files that ``verify_artifact`` reads of an artifact that is whole."""
    return {DESCRIPTION, read_description(path)["files"]["tensors"]}


def verify_artifact(directory: Path) -> list[str]:
    """Lines that say what was checked: checksums, and each tensor and option against the method.

    Whether it fits a model shows when a cache loads it.

    Raises:
        OSError: a file is missing, or can't be read.
        ValueError: damage, or what no calibration makes; a method that this version doesn't know.
    """
    artifact = CalibrationArtifact.from_pretrained(directory)
    if artifact.method not in _METHODS:
        raise ValueError(
            f"{directory} is an artifact of {artifact.method!r}, and this version knows "
            f"{', '.join(_METHODS)}: its checksums are right, but nothing tells what must be in it"
        )
    _METHODS[artifact.method](artifact)
    return [
        f"artifact {artifact.method} of {artifact.model.name}",
        f"tensors  {len(artifact.tensors)}, {artifact.nbytes / 2**20:.2f} MiB: whole",
        f"sha256   {artifact.sha256}",
    ]


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
