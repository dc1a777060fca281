"""The tables and pictures of ``a2ats-ablation``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np
from study_tables import Found, bars_of, by_length, curves_of, layers_table, plot_layers

from hf_kvret.evaluation.plots import plot_heat_maps
from hf_kvret.evaluation.stretches import share
from hf_kvret.evaluation.tables import markdown_table

# By name: space, query-aware, what the paper calls it, and its mean accuracy in table 2, of another
# model on other tasks.
SWITCHES: dict[str, tuple[str, bool, str, str]] = {
    "windowed, query-aware": ("windowed", True, "A2ATS", "86.6"),
    "windowed, plain": ("windowed", False, "WRoPE", "85.9"),
    "rotated, query-aware": ("rotated", True, "QAVQ", "81.1"),
    "rotated, plain": ("rotated", False, "Baseline", "81.4"),
}
PLACES = {"before RoPE": False, "after RoPE": True}
_KINDS = ("recall", "mass", "tokens equal", "rows read")


def _switches_table(cells: Found) -> str:
    """The rows of table 2."""
    columns, rows = by_length(cells, _KINDS)
    wide = []
    for (cache, name), numbers in rows.items():
        *_, known, paper = SWITCHES.get(name, ("-", "-"))
        wide.append([cache, name, known, *numbers, paper])
    header = ["cache", "codebooks", "in the paper", *columns, "paper's accuracy, table 2"]
    return f"{markdown_table(header, wide)}\n\n{_recall_table(cells)}"


def _recall_table(cells: Found) -> str:
    """Recall of each layer that retrieved."""
    known = {
        (cell["cache"], cell["variant"], str(cell["length"])): {
            one["layer"]: one["overlap"] for one in found["layers"]
        }
        for cell, found in cells
    }
    layers = sorted({layer for recalls in known.values() for layer in recalls})
    rows = [
        [*place, *(share(recalls.get(layer)) for layer in layers)]
        for place, recalls in known.items()
    ]
    columns = (f"layer {layer}" for layer in layers)
    return markdown_table(["cache", "recall, codebooks", "context", *columns], rows)


def _budget_table(cells: Found) -> str:
    columns, rows = by_length(cells, _KINDS)
    wide = [[cache, *name.split(", "), *numbers] for (cache, name), numbers in rows.items()]
    return markdown_table(["cache", "budget of", "budget", *columns], wide)


def _errors_table(cells: Found) -> str:
    """Score errors by layer (figure 3), and in how many layers query-aware codebooks win."""
    errors = _errors(cells)
    wins = [
        _wins(f"{space}: query-aware codebooks miss less than plain ones", aware, plain)
        for space in dict.fromkeys(name.split(", ")[0] for name in errors)
        if (aware := errors.get(f"{space}, query-aware")) is not None
        and (plain := errors.get(f"{space}, plain")) is not None
    ]
    return "\n\n".join([layers_table("score error, layer", errors, ".4f"), *wins])


def _errors(cells: Found) -> dict[str, dict[int, float]]:
    """Errors by variant and layer; a layer whose held-out keys don't vary has none."""
    return {
        cell["variant"]: {
            one["layer"]: one["score_error"]
            for one in found["layers"]
            if one["score_error"] is not None
        }
        for cell, found in cells
    }


def _wins(claim: str, lower: dict[int, float], higher: dict[int, float]) -> str:
    shared = lower.keys() & higher.keys()
    number = sum(lower[layer] < higher[layer] for layer in shared)
    return f"{claim} in {number} of {len(shared)} layers."


def _alike_table(cells: Found) -> str:
    """How alike codebooks of different inputs are, by layer (figure 1)."""
    lines = _alike(cells)
    wins = []
    for kind in dict.fromkeys(name.split(": ")[1] for name in lines):
        before, after = (lines.get(f"{place}: {kind}") for place in PLACES)
        if before is not None and after is not None:
            claim = f"{kind}: codebooks are more alike before RoPE than after it"
            wins.append(_wins(claim, after, before))
    return "\n\n".join([layers_table("alike, layer", lines), *wins])


def _alike(cells: Found) -> dict[str, dict[int, float]]:
    """By ``PLACE: KIND / KIND`` and layer, the mean over the pairs of inputs of these kinds."""
    lines: dict[str, dict[int, float]] = {}
    for cell, found in cells:
        kinds = [name.rstrip(" 0123456789") for name in found["inputs"]]
        for layer in found["layers"]:
            pairs: dict[str, list[float]] = {}
            for number, row in enumerate(layer["alike"]):
                for other in range(number + 1, len(row)):
                    pairs.setdefault(f"{kinds[number]} / {kinds[other]}", []).append(row[other])
            for kind, values in pairs.items():
                lines.setdefault(f"{cell['variant']}: {kind}", {})[layer["layer"]] = fmean(values)
    return lines


def _plot_errors(path: Path, cells: Found) -> None:
    title = "A2ATS: held-out text"
    plot_layers(path, _errors(cells), title=title, y="score error", low=0.0)


def _plot_alike(path: Path, cells: Found) -> None:
    title = "A2ATS: codebooks of different inputs"
    plot_layers(path, _alike(cells), title=title, y="mean largest cosine")


def _plot_inputs(path: Path, cells: Found) -> None:
    """All pairs of inputs, mean over layers."""
    maps = {
        cell["variant"]: np.mean([layer["alike"] for layer in found["layers"]], axis=0)
        for cell, found in cells
    }
    names = cells[0][1]["inputs"]
    title = "A2ATS: codebooks of different inputs, mean over layers"
    # The next tenth below all cosines, so that colours tell them apart.
    low = float(np.floor(10 * min(values.min() for values in maps.values())) / 10)
    plot_heat_maps(
        path, maps, rows=names, columns=names, title=title, x="input", y="input", low=low
    )


TABLES: dict[str, Callable[[Found], str]] = {
    "switches": _switches_table,
    "errors": _errors_table,
    "alike": _alike_table,
    "budget_of": _budget_table,
}
PLOTS: dict[str, tuple[str, Callable[[Path, Found], None]]] = {
    "switches": ("switches", bars_of("A2ATS: codebooks", wrapped=True)),
    "errors": ("errors", _plot_errors),
    "alike": ("alike", _plot_alike),
    "inputs": ("alike", _plot_inputs),
    "budget_of": (
        "budget_of",
        # Mass over the rows that were really read: heads of a group agree in part.
        curves_of(
            "A2ATS: who chooses", ("read_ratio", "rows read, share of cold"), ("mass", "mass")
        ),
    ),
}
