"""The pictures of ``aqua-ablation``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aqua_memory import PUBLISHED_TOKENS, SHAPES, bits_measured, bits_on_paper
from aqua_tables import SIDES, by_place, explained_by, rise_of
from aqua_variants import FULL, ablation_rows
from study_tables import Found, plot_layers

from hf_kvret.evaluation.plots import plot_groups, plot_lines


def _plot_bits(path: Path, cells: Found) -> None:
    """Rise of perplexity over the bits that a value really takes."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    places = by_place(cells)
    for (cache, length), known in places.items():
        for name, found in known.items():
            rise = rise_of(found, known.get(FULL))
            if name == FULL or rise is None:
                continue
            method = name.partition(", ")[0]
            line = f"{cache}, {length}: {method}" if len(places) > 1 else method
            xs, ys = lines.setdefault(line, ([], []))
            xs.append(found["bits"])
            # A logarithmic axis has no place for a fall.
            ys.append(100 * rise if rise > 0 else float("nan"))
    title, y = "AQUA-KV and others", "rise of perplexity, %"
    plot_lines(path, lines, title=title, x="bits a value", y=y, log_y=True)


def _plot_parts(path: Path, cells: Found) -> None:
    listed = [(f"{group}: {name}", variant) for group, name, variant, _ in ablation_rows()]
    measured = {cell["variant"] for cell, _ in cells}
    groups = [name for name, variant in listed if variant in measured]
    bars: dict[str, list[float | None]] = {}
    for (cache, length), known in by_place(cells).items():
        rises = [
            rise_of(known.get(variant), known.get(FULL))
            for _, variant in listed
            if variant in measured
        ]
        bars[f"{cache}, {length}"] = [None if rise is None else 100 * rise for rise in rises]
    plot_groups(path, groups, bars, title="AQUA-KV in 2 bits", y="rise of perplexity, %")


def _plot_variance(path: Path, cells: Found) -> None:
    lines = {
        f"{side}s, {variant}": known
        for side in SIDES
        for variant, known in explained_by(cells, side).items()
    }
    title = "AQUA-KV: held-out tokens"
    plot_layers(path, lines, title=title, y="explained variance", high=1.0)


def _plot_alone(path: Path, cells: Found) -> None:
    groups: list[str] = []
    bars: dict[str, list[float | None]] = {}
    for cell, found in cells:
        groups = [f"layer {one['layer']}" for one in found["layers"]]
        rises = [rise_of(one, found["full"]) for one in found["layers"]]
        name = f"{cell['variant']}, {cell['length']}"
        bars[name] = [None if rise is None else 100 * rise for rise in rises]
    plot_groups(path, groups, bars, title="One layer coded alone", y="rise of perplexity, %")


def _plot_memory(path: Path, cells: Found) -> None:
    groups = [f"{name}, {cell['variant']}" for cell, _ in cells for name in SHAPES]
    on_paper = [
        bits_on_paper(shape, PUBLISHED_TOKENS, cell["variant"])["all"]
        for cell, _ in cells
        for shape in SHAPES.values()
    ]
    real = [
        bits_measured(shape, found, PUBLISHED_TOKENS)["all"]
        for _, found in cells
        for shape in SHAPES.values()
    ]
    title = f"AQUA-KV at {PUBLISHED_TOKENS} tokens"
    bars = {"on paper": on_paper, "measured": real}
    plot_groups(path, groups, bars, title=title, y="bits a value")


PLOTS: dict[str, tuple[str, Callable[[Path, Found], None]]] = {
    "bits": ("bits", _plot_bits),
    "parts": ("parts", _plot_parts),
    "variance": ("variance", _plot_variance),
    "layers": ("layers", _plot_alone),
    "memory": ("memory", _plot_memory),
}
