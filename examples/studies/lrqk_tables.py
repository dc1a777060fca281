"""The tables and pictures of ``lrqk-factors``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from lrqk_variants import ALTERNATING, OPTIMUM, PER_HEAD, VARIANTS

from hf_kvret.evaluation.plots import part_pictures, plot_lines
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

# Errors that should be equal differ by the rounding of the maps, which are fp32.
_ROUNDING = 1e-6
# As many lines as there are colours; with more variants than that, these are drawn.
_LINES = 10
_DRAWN = (
    PER_HEAD,
    *ALTERNATING,
    f"{PER_HEAD} r/G",
    "shared",
    "shared int8",
    "shared weighted",
    "shared unseen",
)
# On a logarithmic scale, errors below this are rounding and would hide the others.
_LEAST_SHOWN = 1e-5

Key = tuple[str, int, str, int]


def factor_tables(results: Results) -> str:
    """Errors, then recall and mass: a row for each rank and variant, a column a layer."""
    known = _by_rank(results)
    several = len({cache for cache, *_ in known}) > 1
    numbers = sorted({one["layer"] for layers in known.values() for one in layers})
    errors: list[list[str]] = []
    recalls: list[list[str]] = []
    for (cache, length, variant, rank), layers in known.items():
        row = [f"{length}", f"{rank}", variant, f"{_mean(layers, 'numbers'):g}"]
        for rows, name in ((errors, "error"), (recalls, "recall")):
            values = {one["layer"]: one[name] for one in layers}
            shown = [f"{values[n]:.4f}" if n in values else "-" for n in numbers]
            rows.append([*([cache] if several else []), *row, *shown])
        for rows, names in (
            (errors, ("error", "centered_error")),
            (recalls, ("recall", "mass", "best_mass")),
        ):
            rows[-1] += [f"{_mean(layers, name):.4f}" for name in names]
    head = [*(["cache"] if several else []), "tokens", "rank", "variant", "numbers"]
    head += [f"layer {number}" for number in numbers]
    parts = [
        "relative error of the scores:",
        markdown_table([*head, "mean", "less mean score"], errors),
        "recall of the exact top-k:",
        markdown_table([*head, "mean", "mass", "best mass"], recalls),
    ]
    return "\n\n".join([*parts, *_checks(known)])


def factor_pictures(path: Path) -> list[Path]:
    """The pictures that ``plot_factors`` writes."""
    return list(part_pictures(path, ("error", "recall")).values())


def plot_factors(path: Path, results: Results) -> None:
    """Errors over rank to ``path``, recall over rank to ``NAME-recall`` beside it."""
    known = _by_rank(results)
    if len({variant for _, _, variant, _ in known}) > _LINES:
        known = {key: layers for key, layers in known.items() if key[2] in _DRAWN}
    one_text = len({(cache, length) for cache, length, _, _ in known}) == 1
    path, beside = factor_pictures(path)
    for name, place, y in (
        ("error", path, "relative error, mean of layers"),
        ("recall", beside, "recall of the exact top-k, mean of layers"),
    ):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for (cache, length, variant, rank), layers in known.items():
            label = variant if one_text else f"{variant} ({cache}, {length})"
            value = _mean(layers, name)
            if name == "recall" or value > _LEAST_SHOWN:
                xs, ys = lines.setdefault(label, ([], []))
                xs.append(rank)
                ys.append(value)
        plot_lines(
            place,
            lines,
            title="LRQK's factors",
            x="rank",
            y=y,
            log_x=True,
            log_y=name == "error",
        )


def _by_rank(results: Results) -> dict[Key, list[dict[str, Any]]]:
    """The layers of each cell that has any, by cache, length, variant and rank."""
    known: dict[Key, list[dict[str, Any]]] = {
        (cell["cache"], cell["length"], cell["variant"], cell["rank"]): found["layers"]
        for cell, found in results
        if found["layers"]
    }
    order = {name: number for number, name in enumerate(VARIANTS)}
    places = sorted(known, key=lambda key: (key[1], key[0], key[3], order[key[2]]))
    return {key: known[key] for key in places}


def _checks(known: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """What must hold, counted over layers, ranks and starts; nothing where it was not measured."""
    kept, asked, furthest = 0, 0, []
    for (cache, length, variant, rank), layers in known.items():
        closed = known.get((cache, length, PER_HEAD, rank))
        if closed is None or variant not in (*ALTERNATING, OPTIMUM):
            continue
        for ours, theirs in zip(closed, layers, strict=True):
            pairs = list(zip(ours["errors"], theirs["errors"], strict=True))
            if variant == OPTIMUM:
                furthest.append(max(abs(one - other) for one, other in pairs))
            else:
                asked += 1
                kept += all(one <= other + _ROUNDING for one, other in pairs)
    lines = []
    if furthest:
        lines.append(f"closed form and optimum: errors at most {max(furthest):.1e} apart in a head")
    if asked:
        lines.append(
            f"closed form no worse than ALS in any head (up to {_ROUNDING:g}): {kept} of {asked} "
            "layer x rank x start"
        )
    return lines


def _mean(layers: list[dict[str, Any]], name: str) -> float:
    return fmean(one[name] for one in layers)
