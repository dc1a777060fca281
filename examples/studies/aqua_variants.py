"""Variants of the study of AQUA-KV's predictors, and tables and pictures of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from ablation import (
    CellResults,
    Plot,
    Table,
    layers_of,
    layers_table,
    lines_of,
    rows_tables,
    shown,
)

from hf_kvret.lab.report.plots import plot_groups, plot_lines
from hf_kvret.lab.report.tables import markdown_table

FULL, USUAL = "full", "aqua"
SIDES = ("key", "value")
SHARES = ("kept", "needed")
BITS = (2, 3, 4)
# Bits of the paper's table 1, which the ablations of this command use too.
FEW_BITS = 2


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
        learned: changes to the calibration of the artifact; None where nothing is predicted.
        cache: changes to the options of ``aqua``.
        other: another cache, as ``--caches`` names it; then there is neither of these.
        paper: perplexity of Llama 3.2 3B on WikiText-2 (tables 1 and 5); None where there is none.
    """

    learned: Mapping[str, Any] | None = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    other: str | None = None
    paper: float | None = None


_AQUA = Variant({"bits": FEW_BITS}, {"bits": FEW_BITS}, paper=7.03)
_FULL = Variant(None, other=FULL, paper=6.98)
_AGNOSTIC = {"bits": 16, "first_bits": 16}


def _changed(paper: float | None = None, *, cache: Any = None, **learned: Any) -> Variant:
    """The usual variant with its calibration, and maybe its cache, changed."""
    return Variant({"bits": FEW_BITS, **learned}, {"bits": FEW_BITS, **(cache or {})}, paper=paper)


ABLATIONS: dict[str, dict[str, Variant]] = {
    "first layer": {
        "16 bits": _changed(7.03, first_bits=16),
        "4 bits": _AQUA,
        "3 bits": _changed(7.03, first_bits=3),
        "2 bits": _changed(7.05, first_bits=2),
        "4 bits, mean taken off": _changed(anchor_mean=True),
    },
    "sinks": {
        "0": _changed(7.15, sinks=0, cache={"sink": 0}),
        "4": _AQUA,
        "64": _changed(7.01, sinks=64, cache={"sink": 64}),
    },
    "keys": {"before RoPE": _AQUA, "after RoPE": _changed(7.05, space="after")},
    "inputs": {
        "values from keys and values": _AQUA,
        "no predictors (HIGGS)": Variant(None, {"bits": FEW_BITS, "predictor": "none"}, paper=7.47),
    },
    "calibrated": {
        "with 2 bits": _AQUA,
        "without a codec": _changed(7.13, cache={"first_bits": 4}, **_AGNOSTIC),
    },
}
"""By what is varied. The usual variant stands in each group, and is measured once."""

EXPLAINED: dict[str, Mapping[str, Any]] = {
    "exact": _AGNOSTIC,
    **{f"{bits} bits": {"bits": bits} for bits in reversed(BITS)},
}
"""By what predictors read: the layer below as it is, or as so many bits leave it."""

# Perplexities of Llama 3.1 8B (table 2).
PAPER_8B = {
    "full": 5.61,
    **{"aqua, 2 bits": 5.72, "aqua, 3 bits": 5.64, "aqua, 4 bits": 5.61},
    **{"higgs, 2 bits": 5.89, "higgs, 3 bits": 5.66, "higgs, 4 bits": 5.62},
    **{"kivi, 2 bits": 7.37, "kivi, 3 bits": 6.04, "kivi, 4 bits": 5.64},
}

PRUNED: dict[str, tuple[Mapping[str, Any], float]] = {
    "h2o": ({"bits": 16, "predictor": "none"}, 38.82),
    "h2o + higgs, 2 bits": ({"bits": 2, "predictor": "none"}, 37.02),
    "h2o + aqua, 2 bits": ({"bits": 2}, 38.43),
    "h2o + aqua, 3 bits": ({"bits": 3}, 38.76),
    "h2o + aqua, 4 bits": ({"bits": 4}, 38.85),
}
"""Options of ``PrunedCache``, and LongBench of Llama 3.2 3B (tables 3 and 12, 20% of tokens)."""


def bit_variants() -> dict[str, Variant]:
    """The rows of table 2 by name, ``METHOD, N bits``."""
    results = {FULL: _FULL}
    for bits in BITS:
        results[f"{USUAL}, {bits} bits"] = Variant({"bits": bits}, {"bits": bits})
        results[f"higgs, {bits} bits"] = Variant(None, {"bits": bits, "predictor": "none"})
    return results


def ablation_variants() -> dict[str, Variant]:
    """The rows of table 1 by name: ``full``, ``aqua``, and ``GROUP: VARIANT`` of all others."""
    rows = {cell: ABLATIONS[group][name] for group, name, cell, _ in ablation_rows()}
    return {FULL: _FULL, USUAL: _AQUA, **rows}


def ablation_rows() -> list[tuple[str, str, str, float | None]]:
    """``(group, variant, name of its cell, paper's perplexity)``, the usual one in each group."""
    return [
        (group, name, USUAL if variant is _AQUA else f"{group}: {name}", variant.paper)
        for group, variants in ABLATIONS.items()
        for name, variant in variants.items()
    ]


# Shares of the rise in HIGGS's perplexity that are left, by the paper's table 2.
_PAPERSHARES = "the paper: 10% on 3B, 39% on 8B, 35% on 70B"


def _by_place(cells: CellResults) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By cache and length, then by variant."""
    places: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell, result in cells:
        places.setdefault((cell["cache"], cell["length"]), {})[cell["variant"]] = result
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


def _bits_table(cells: CellResults) -> str:
    """The rows of table 2."""
    rows, lines = [], []
    for (cache, context), results in _by_place(cells).items():
        full = results.get(FULL)
        for name, result in results.items():
            method, _, bits = name.partition(", ")
            rise, published = _rise_of(result, full), PAPER_8B.get(name)
            share = _share(rise, _rise_of(results.get(f"higgs, {bits}"), full))
            width = bits.partition(" ")[0] or f"{result['full_bits']:g}"
            row = [cache, str(context), method, width, f"{result['bits']:.3f}"]
            row += [
                f"{result['held_ratio']:.1%}",
                f"{result['ppl']:.3f}",
                _shown_rise(result, full),
            ]
            paper = shown(published and published / PAPER_8B[FULL] - 1, "+.1%")
            rows.append([*row, shown(share, ".0%"), paper])
        for count in BITS:
            names = (f"{method}, {count} bits" for method in (USUAL, "higgs"))
            share = _share(*(_rise_of(results.get(name), full) for name in names))
            if share is not None and share <= 0:
                lines.append(f"{cache}, {context}: at {count} bits only higgs's perplexity rises.")
            elif share is not None:
                note = f" (aim: at most 40%; {_PAPERSHARES})" if count == BITS[0] else ""
                lines.append(
                    f"{cache}, {context}: at {count} bits {USUAL}'s perplexity rises by "
                    f"{share:.0%} of what higgs's does{note}."
                )
    header = ["cache", "context", "method", "bits", "bits a value", "bytes / full K,V"]
    header += ["perplexity", "rise", "of higgs's", "rise in the paper, 8B"]
    return "\n\n".join([markdown_table(header, rows), *lines])


def _share(rise: float | None, of: float | None) -> float | None:
    """None where HIGGS costs nothing that could be saved."""
    return None if rise is None or of is None or of <= 0 else rise / of


def _parts_table(cells: CellResults) -> str:
    """The rows of tables 1 and 5."""
    rows = []
    for (cache, context), results in _by_place(cells).items():
        full = results.get(FULL)
        listed = [("full attention", "", FULL, 6.98), *ablation_rows()]
        known = {variant for _, _, variant, _ in listed}
        # Results of 0.1.0 have variants that are no longer there.
        for variant in sorted(results.keys() - known):
            group, _, name = variant.partition(": ")
            listed.append((group, name, variant, None))
        for group, name, variant, published in listed:
            result = results.get(variant)
            if result is None:
                continue
            name = f"{name} (usual)" if variant == USUAL else name
            size = f"{result['predictor_bytes'] / 2**10:.0f}"
            row = [cache, str(context), group, name, f"{result['bits']:.3f}", size]
            row += [f"{result['ppl']:.3f}", _shown_rise(result, full), shown(published, ".2f")]
            rows.append(row)
    header = ["cache", "context", "what", "how", "bits a value", "predictors, KiB"]
    return markdown_table([*header, "perplexity", "rise", "in the paper, 3B"], rows)


def _variance_tables(cells: CellResults) -> str:
    """Explained variance by layer (figure 5), and what is missed with predictors and without."""
    titles = {"key": "keys explained, layer", "value": "values explained, layer"}
    tables = [layers_table(title, _explained_by(cells, side)) for side, title in titles.items()]
    return "\n\n".join([*tables, layers_table("error, layer", _errors(cells), ".4f")])


def _pruned_table(cells: CellResults) -> str:
    """The rows of table 3."""
    rows = []
    for (cache, context), results in _by_place(cells).items():
        for name, result in results.items():
            row = [cache, str(context), name, *(shown(result.get(x), ".1%") for x in SHARES)]
            row += [f"{result['ppl']:.3f}", _shown_rise(result, results.get(FULL))]
            rows.append([*row, f"{PRUNED[name][1] if name in PRUNED else 44.61:.2f}"])
    header = ["cache", "context", "method", "tokens that a head keeps", "rows that predictors need"]
    table = markdown_table([*header, "perplexity", "rise", "LongBench in the paper, 3B"], rows)
    return f"{table}\n\nAfter the context this table's tokens enter one a forward pass."


def _depth_tables(cells: CellResults) -> str:
    """What one layer below predicts, and two (table 5, "Inputs from layers")."""
    titles = {f"{side}_{x}": f"{side}s: {x}" for x in ("explained", "error") for side in SIDES}
    return rows_tables(cells[0][1], titles)


def _explained_by(cells: CellResults, side: str) -> dict[str, dict[int, float]]:
    """By variant and layer. Results of 0.1.0 also vary what values alone are predicted from."""
    return {
        cell["variant"]: _figure(result, f"{side}_explained")
        for cell, result in cells
        if side == "value" or not cell["variant"].startswith("from ")
    }


def _errors(cells: CellResults) -> dict[str, dict[int, float]]:
    """Mean squares of what is missed, in units of the variance, at each number of bits."""
    results = {}
    for cell, result in cells:
        if cell["variant"].endswith(" bits"):
            for side in SIDES:
                for name, figure in (("", "error"), (", nothing predicted", "error_unpredicted")):
                    title = f"{side}s, {cell['variant']}{name}"
                    results[title] = _figure(result, f"{side}_{figure}")
    return results


def _figure(result: dict[str, Any], name: str) -> dict[int, float]:
    layers = result["layers"]
    return {one["layer"]: one[name] for one in layers if one.get(name) is not None}


def _plot_bits(path: Path, cells: CellResults) -> None:
    """Rise of perplexity over the bits that a value really takes."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    places = _by_place(cells)
    for (cache, context), results in places.items():
        for name, result in results.items():
            rise = _rise_of(result, results.get(FULL))
            if name == FULL or rise is None:
                continue
            method = name.partition(", ")[0]
            line = f"{cache}, {context}: {method}" if len(places) > 1 else method
            xs, ys = lines.setdefault(line, ([], []))
            xs.append(result["bits"])
            # A logarithmic axis has no place for a fall.
            ys.append(100 * rise if rise > 0 else float("nan"))
    title, y = "AQUA-KV and others", "rise of perplexity, %"
    plot_lines(path, lines, title=title, x="bits a value", y=y, log_y=True)


def _plot_parts(path: Path, cells: CellResults) -> None:
    listed = [(f"{group}: {name}", variant) for group, name, variant, _ in ablation_rows()]
    measured = {cell["variant"] for cell, _ in cells}
    groups = [name for name, variant in listed if variant in measured]
    bars: dict[str, list[float | None]] = {}
    for (cache, context), results in _by_place(cells).items():
        rises = [results.get(variant) for _, variant in listed if variant in measured]
        bars[f"{cache}, {context}"] = [_percent(one, results.get(FULL)) for one in rises]
    plot_groups(path, groups, bars, title="AQUA-KV in 2 bits", y="rise of perplexity, %")


def _both_explained(cells: CellResults) -> dict[str, dict[int, float]]:
    return {
        f"{side}s, {variant}": shares
        for side in SIDES
        for variant, shares in _explained_by(cells, side).items()
    }


TABLES: dict[str, Table] = {
    "bits": _bits_table,
    "parts": _parts_table,
    "variance": _variance_tables,
    "depth": _depth_tables,
    "pruned": _pruned_table,
}
PLOTS: dict[str, Plot] = {
    "bits": _plot_bits,
    "parts": _plot_parts,
    "variance": layers_of(
        _both_explained, "AQUA-KV: held-out tokens", "explained variance", high=1.0
    ),
    "depth": layers_of(
        lambda cells: lines_of(cells[0][1], "key_explained"), "AQUA-KV: keys", "explained variance"
    ),
}
