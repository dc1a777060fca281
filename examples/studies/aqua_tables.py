"""The tables and pictures of ``aqua-ablation``."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev
from typing import Any

from aqua_variants import BITS, FULL, PAPER_8B, USUAL, ablation_rows
from study_tables import Found, Plot, Table, layers_of, layers_table, shown

from hf_kvret.lab.report.plots import plot_groups, plot_lines
from hf_kvret.lab.report.tables import markdown_table

_SIDES = ("key", "value")
# Of what HIGGS's perplexity rises, in the paper's table 2 and in the aim.
_PAPER_SHARES = "the paper: 10% on 3B, 39% on 8B, 35% on 70B"


def _by_place(cells: Found) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By cache and length, then by variant."""
    places: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell, found in cells:
        places.setdefault((cell["cache"], cell["length"]), {})[cell["variant"]] = found
    return places


def _rise_of(found: dict[str, Any] | None, full: dict[str, Any] | None) -> float | None:
    """How much higher a perplexity is than that of full attention, as a share of it."""
    return None if found is None or full is None else found["ppl"] / full["ppl"] - 1


def _percent(found: dict[str, Any] | None, full: dict[str, Any] | None) -> float | None:
    rise = _rise_of(found, full)
    return None if rise is None else 100 * rise


def _shown_rise(found: dict[str, Any], full: dict[str, Any] | None) -> str:
    """The rise, with its standard error where there are several windows: they were all the same."""
    rise = _rise_of(found, full)
    if rise is None or full is None:
        return "-"
    pairs = zip(found["window_nats"], full["window_nats"], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    if len(differences) < 2:
        return f"{rise:+.2%}"
    error = (1 + rise) * stdev(differences) / math.sqrt(len(differences))
    return f"{rise:+.2%} ± {error:.2%}"


def _bits_table(cells: Found) -> str:
    """The rows of table 2."""
    rows, lines = [], []
    for (cache, length), known in _by_place(cells).items():
        full = known.get(FULL)
        for name, found in known.items():
            method, _, bits = name.partition(", ")
            rise, published = _rise_of(found, full), PAPER_8B.get(name)
            share = _share(rise, _rise_of(known.get(f"higgs, {bits}"), full))
            count = bits.partition(" ")[0] or f"{found['full_bits']:g}"
            row = [cache, str(length), method, count, f"{found['bits']:.3f}"]
            row += [f"{found['held_ratio']:.1%}", f"{found['ppl']:.3f}", _shown_rise(found, full)]
            paper = shown(published and published / PAPER_8B[FULL] - 1, "+.1%")
            rows.append([*row, shown(share, ".0%"), paper])
        for count in BITS:
            names = (f"{method}, {count} bits" for method in (USUAL, "higgs"))
            share = _share(*(_rise_of(known.get(name), full) for name in names))
            if share is not None and share <= 0:
                lines.append(f"{cache}, {length}: at {count} bits only higgs's perplexity rises.")
            elif share is not None:
                note = f" (aim: at most 40%; {_PAPER_SHARES})" if count == BITS[0] else ""
                lines.append(
                    f"{cache}, {length}: at {count} bits {USUAL}'s perplexity rises by {share:.0%} "
                    f"of what higgs's does{note}."
                )
    header = ["cache", "context", "method", "bits", "bits a value", "bytes / full K,V"]
    header += ["perplexity", "rise", "of higgs's", "rise in the paper, 8B"]
    return "\n\n".join([markdown_table(header, rows), *lines])


def _share(rise: float | None, of: float | None) -> float | None:
    """None where HIGGS costs nothing that could be saved."""
    return None if rise is None or of is None or of <= 0 else rise / of


def _parts_table(cells: Found) -> str:
    """The rows of tables 1 and 5."""
    rows = []
    for (cache, length), known in _by_place(cells).items():
        full = known.get(FULL)
        listed = [("full attention", "", FULL, 6.98), *ablation_rows()]
        for group, name, variant, published in listed:
            found = known.get(variant)
            if found is None:
                continue
            name = f"{name} (usual)" if variant == USUAL else name
            size = f"{found['predictor_bytes'] / 2**10:.0f}"
            row = [cache, str(length), group, name, f"{found['bits']:.3f}", size]
            row += [f"{found['ppl']:.3f}", _shown_rise(found, full), shown(published, ".2f")]
            rows.append(row)
    header = ["cache", "context", "what", "how", "bits a value", "predictors, KiB"]
    return markdown_table([*header, "perplexity", "rise", "in the paper, 3B"], rows)


def _variance_tables(cells: Found) -> str:
    """Explained variance by layer (figure 2), and what is missed with predictors and without."""
    titles = {"key": "keys explained, layer", "value": "values explained, layer"}
    tables = [layers_table(title, _explained_by(cells, side)) for side, title in titles.items()]
    return "\n\n".join([*tables, layers_table("error, layer", _errors(cells), ".4f")])


def _explained_by(cells: Found, side: str) -> dict[str, dict[int, float]]:
    """By variant and layer; keys don't depend on what predicts values."""
    found = {}
    for cell, result in cells:
        if side == "value" or not cell["variant"].startswith("from "):
            found[cell["variant"]] = _figure(result, f"{side}_explained")
    return found


def _errors(cells: Found) -> dict[str, dict[int, float]]:
    """Mean squares of what is missed, in units of the variance, at each number of bits."""
    found = {}
    for cell, result in cells:
        if cell["variant"].endswith(" bits"):
            for side in _SIDES:
                for name, figure in (("", "error"), (", nothing predicted", "error_unpredicted")):
                    title = f"{side}s, {cell['variant']}{name}"
                    found[title] = _figure(result, f"{side}_{figure}")
    return found


def _figure(result: dict[str, Any], name: str) -> dict[int, float]:
    layers = result["layers"]
    return {one["layer"]: one[name] for one in layers if one.get(name) is not None}


def _plot_bits(path: Path, cells: Found) -> None:
    """Rise of perplexity over the bits that a value really takes."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    places = _by_place(cells)
    for (cache, length), known in places.items():
        for name, found in known.items():
            rise = _rise_of(found, known.get(FULL))
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
    for (cache, length), known in _by_place(cells).items():
        rises = [known.get(variant) for _, variant in listed if variant in measured]
        bars[f"{cache}, {length}"] = [_percent(one, known.get(FULL)) for one in rises]
    plot_groups(path, groups, bars, title="AQUA-KV in 2 bits", y="rise of perplexity, %")


def _both_explained(cells: Found) -> dict[str, dict[int, float]]:
    return {
        f"{side}s, {variant}": known
        for side in _SIDES
        for variant, known in _explained_by(cells, side).items()
    }


TABLES: dict[str, Table] = {
    "bits": _bits_table,
    "parts": _parts_table,
    "variance": _variance_tables,
}
PLOTS: dict[str, Plot] = {
    "bits": _plot_bits,
    "parts": _plot_parts,
    "variance": layers_of(
        _both_explained, "AQUA-KV: held-out tokens", "explained variance", high=1.0
    ),
}
