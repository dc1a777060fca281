"""The tables and pictures of ``a2ats-ablation``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hf_kvret.evaluation.a2ats_artifacts import SWITCHES
from hf_kvret.evaluation.plots import part_pictures, plot_groups, plot_heat_maps, plot_lines
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import share
from hf_kvret.evaluation.tables import markdown_table

PLACES = {"before RoPE": False, "after RoPE": True}
# Mean accuracy of table 2, of another model on other tasks.
_NAMES = {name: known for name, (_, _, known) in SWITCHES.items()}
_PAPER = {"Baseline": "81.4", "WRoPE": "85.9", "QAVQ": "81.1", "A2ATS": "86.6"}
_KINDS = ("recall", "mass", "tokens equal", "rows read")
Found = list[tuple[Cell, dict[str, Any]]]


def ablation_tables(results: Results) -> str:
    """A markdown table for each part that was run, and who wins where."""
    tables: dict[str, Callable[[Found], str]] = {
        "switches": _switches_table,
        "errors": _errors_table,
        "alike": _alike_table,
        "budget_of": _budget_table,
    }
    known = {part: _of(results, part) for part in tables}
    return "\n\n".join(tables[part](found) for part, found in known.items() if found)


def ablation_pictures(path: Path) -> list[Path]:
    """The pictures that ``plot_ablation`` writes where all parts were run."""
    return list(part_pictures(path, _PLOTS).values())


def plot_ablation(path: Path, results: Results) -> None:
    """A picture for each part that was run: ``path``, then ``NAME-PART`` beside it."""
    used = [name for name, (part, _) in _PLOTS.items() if _of(results, part)]
    for name, own in part_pictures(path, used).items():
        part, plot = _PLOTS[name]
        plot(own, _of(results, part))


def _of(results: Results, part: str) -> Found:
    return [(cell, found) for cell, found in results if cell["part"] == part]


def _switches_table(cells: Found) -> str:
    """The rows of table 2."""
    columns, rows = _measured(cells)
    wide = [
        [cache, name, (known := _NAMES.get(name, "-")), *numbers, _PAPER.get(known, "-")]
        for (cache, name), numbers in rows.items()
    ]
    header = ["cache", "codebooks", "in the paper", *columns, "paper's accuracy, table 2"]
    return f"{markdown_table(header, wide)}\n\n{_layers_table(cells)}"


def _layers_table(cells: Found) -> str:
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
    columns, rows = _measured(cells)
    wide = [[cache, *name.split(", "), *numbers] for (cache, name), numbers in rows.items()]
    return markdown_table(["cache", "budget of", "budget", *columns], wide)


def _measured(cells: Found) -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """Columns for each length, and their cells by cache and variant."""
    known = {(cell["cache"], cell["variant"], cell["length"]): found for cell, found in cells}
    lengths = sorted({length for _, _, length in known})
    rows: dict[tuple[str, str], list[str]] = {}
    for cache, variant in dict.fromkeys((cache, variant) for cache, variant, _ in known):
        row = rows.setdefault((cache, variant), [])
        for length in lengths:
            found = known.get((cache, variant, length))
            row += ["-"] * len(_KINDS) if found is None else _numbers(found)
    return [f"{kind}, {length}" for length in lengths for kind in _KINDS], rows


def _numbers(found: dict[str, Any]) -> list[str]:
    return [
        share(found["overlap"]),
        f"{found['mass']:.3f} of {found['best_mass']:.3f}",
        share(found["equal"]),
        f"{found['read_ratio']:.1%}",
    ]


def _errors_table(cells: Found) -> str:
    """Score errors by layer (figure 3), and in how many layers query-aware codebooks win."""
    errors = _errors(cells)
    layers = sorted({layer for known in errors.values() for layer in known})
    rows = [
        [str(layer), *(_error(known.get(layer)) for known in errors.values())] for layer in layers
    ]
    means = [fmean(known.values()) if known else None for known in errors.values()]
    rows.append(["mean", *map(_error, means)])
    header = ["score error, layer", *errors]
    wins = [
        _wins(f"{space}: query-aware codebooks miss less than plain ones", aware, plain)
        for space in dict.fromkeys(name.split(", ")[0] for name in errors)
        if (aware := errors.get(f"{space}, query-aware")) is not None
        and (plain := errors.get(f"{space}, plain")) is not None
    ]
    return "\n\n".join([markdown_table(header, rows), *wins])


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


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _wins(claim: str, lower: dict[int, float], higher: dict[int, float]) -> str:
    shared = lower.keys() & higher.keys()
    number = sum(lower[layer] < higher[layer] for layer in shared)
    return f"{claim} in {number} of {len(shared)} layers."


def _alike_table(cells: Found) -> str:
    """How alike codebooks of different inputs are, by layer (figure 1)."""
    lines = _alike(cells)
    layers = sorted({layer for known in lines.values() for layer in known})
    rows = [
        [str(layer), *(share(known.get(layer)) for known in lines.values())] for layer in layers
    ]
    rows.append(["mean", *(share(fmean(known.values())) for known in lines.values())])
    wins = []
    for kind in dict.fromkeys(name.split(": ")[1] for name in lines):
        before, after = (lines.get(f"{place}: {kind}") for place in PLACES)
        if before is not None and after is not None:
            claim = f"{kind}: codebooks are more alike before RoPE than after it"
            wins.append(_wins(claim, after, before))
    return "\n\n".join([markdown_table(["alike, layer", *lines], rows), *wins])


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


def _plot_switches(path: Path, cells: Found) -> None:
    groups = list(dict.fromkeys(cell["variant"] for cell, _ in cells))
    bars: dict[str, list[float | None]] = {}
    for cell, found in cells:
        heights = bars.setdefault(f"{cell['cache']}, {cell['length']}", [None] * len(groups))
        heights[groups.index(cell["variant"])] = found["overlap"]
    # Long names of neighbours would run into each other.
    labels = [name.replace(", ", ",\n") for name in groups]
    plot_groups(path, labels, bars, title="A2ATS: codebooks", y="recall")


def _plot_errors(path: Path, cells: Found) -> None:
    y = "score error"
    lines = _by_layer(_errors(cells))
    plot_lines(path, lines, title="A2ATS: held-out text", x="layer", y=y, whole_x=True, low=0.0)


def _plot_alike(path: Path, cells: Found) -> None:
    title = "A2ATS: codebooks of different inputs"
    lines, y = _by_layer(_alike(cells)), "mean largest cosine"
    plot_lines(path, lines, title=title, x="layer", y=y, whole_x=True)


def _by_layer(
    lines: dict[str, dict[int, float]],
) -> dict[str, tuple[list[float], list[float]]]:
    return {
        name: ([float(layer) for layer in known], list(known.values()))
        for name, known in lines.items()
    }


def _plot_inputs(path: Path, cells: Found) -> None:
    """All pairs of inputs, mean over layers."""
    maps = {
        cell["variant"]: np.mean([layer["alike"] for layer in found["layers"]], axis=0)
        for cell, found in cells
    }
    names = cells[0][1]["inputs"]
    title = "A2ATS: codebooks of different inputs, mean over layers"
    low = _low(maps.values())
    plot_heat_maps(
        path, maps, rows=names, columns=names, title=title, x="input", y="input", low=low
    )


def _low(maps: Iterable[np.ndarray]) -> float:
    """The next tenth below all cosines, so that colours tell them apart."""
    return float(np.floor(10 * min(values.min() for values in maps)) / 10)


def _plot_budget(path: Path, cells: Found) -> None:
    """Mass over the rows that were really read: heads of a group agree in part."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    several = len({(cell["cache"], cell["length"]) for cell, _ in cells}) > 1
    for cell, found in sorted(cells, key=lambda one: float(one[1]["read_ratio"])):
        name = cell["variant"].split(", ")[0]
        name = f"{cell['cache']}, {cell['length']}: {name}" if several else name
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(found["read_ratio"])
        ys.append(found["mass"])
    plot_lines(path, lines, title="A2ATS: who chooses", x="rows read, share of cold", y="mass")


_PLOTS: dict[str, tuple[str, Callable[[Path, Found], None]]] = {
    "switches": ("switches", _plot_switches),
    "errors": ("errors", _plot_errors),
    "alike": ("alike", _plot_alike),
    "inputs": ("alike", _plot_inputs),
    "budget_of": ("budget_of", _plot_budget),
}
