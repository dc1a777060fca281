"""Descriptions of an artifact for people: text, a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_kvret.artifacts.artifact import CalibrationArtifact
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.identity import printable


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
    rows = [[printable(_cell(row.get(name))) for name in names] for row in artifact.quality]
    return markdown_table([printable(name.replace("_", " ")) for name in names], rows)


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


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
