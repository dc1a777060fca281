"""The tables of ``aqua-ablation``."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

from aqua_memory import KINDS, PUBLISHED_TOKENS, SHAPES, bits_measured, bits_on_paper
from aqua_variants import BITS, FULL, PAPER_8B, USUAL, ablation_rows
from study_tables import Found, layers_table, shown

from hf_kvret.evaluation.tables import markdown_table

SIDES = ("key", "value")
# Of what HIGGS's perplexity rises, in the paper's table 2 and in the aim.
_PAPER_SHARES = "the paper: 10% on 3B, 39% on 8B, 35% on 70B"


def by_place(cells: Found) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """By cache and length, then by variant."""
    places: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for cell, found in cells:
        places.setdefault((cell["cache"], cell["length"]), {})[cell["variant"]] = found
    return places


def rise_of(found: dict[str, Any] | None, full: dict[str, Any] | None) -> float | None:
    """How much higher a perplexity is than that of full attention, as a share of it."""
    return None if found is None or full is None else found["ppl"] / full["ppl"] - 1


def _riseshown(found: dict[str, Any], full: dict[str, Any] | None) -> str:
    """The rise, with its standard error where there are several windows: they were all the same."""
    rise = rise_of(found, full)
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
    for (cache, length), known in by_place(cells).items():
        full = known.get(FULL)
        for name, found in known.items():
            method, _, bits = name.partition(", ")
            rise, published = rise_of(found, full), PAPER_8B.get(name)
            share = _share(rise, rise_of(known.get(f"higgs, {bits}"), full))
            rows.append(
                [
                    cache,
                    str(length),
                    method,
                    bits.partition(" ")[0] or f"{found['full_bits']:g}",
                    f"{found['bits']:.3f}",
                    f"{found['held_ratio']:.1%}",
                    f"{found['ppl']:.3f}",
                    _riseshown(found, full),
                    shown(share, ".0%"),
                    shown(published and published / PAPER_8B[FULL] - 1, "+.1%"),
                ]
            )
        for count in BITS:
            names = (f"{method}, {count} bits" for method in (USUAL, "higgs"))
            share = _share(*(rise_of(known.get(name), full) for name in names))
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
    for (cache, length), known in by_place(cells).items():
        full = known.get(FULL)
        listed = [("full attention", "", FULL, 6.98), *ablation_rows()]
        for group, name, variant, published in listed:
            found = known.get(variant)
            if found is None:
                continue
            usual = variant == USUAL
            rows.append(
                [
                    cache,
                    str(length),
                    group,
                    f"{name} (usual)" if usual else name,
                    f"{found['bits']:.3f}",
                    f"{found['predictor_bytes'] / 2**10:.0f}",
                    f"{found['ppl']:.3f}",
                    _riseshown(found, full),
                    shown(published, ".2f"),
                ]
            )
    header = ["cache", "context", "what", "how", "bits a value", "predictors, KiB"]
    return markdown_table([*header, "perplexity", "rise", "in the paper, 3B"], rows)


def _variance_tables(cells: Found) -> str:
    """Explained variance by layer (figure 2), and what is missed with predictors and without."""
    titles = {"key": "keys explained, layer", "value": "values explained, layer"}
    tables = [layers_table(title, explained_by(cells, side)) for side, title in titles.items()]
    return "\n\n".join([*tables, layers_table("error, layer", _errors(cells), ".4f")])


def explained_by(cells: Found, side: str) -> dict[str, dict[int, float]]:
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
            for side in SIDES:
                for name, figure in (("", "error"), (", nothing predicted", "error_unpredicted")):
                    title = f"{side}s, {cell['variant']}{name}"
                    found[title] = _figure(result, f"{side}_{figure}")
    return found


def _figure(result: dict[str, Any], name: str) -> dict[int, float]:
    layers = result["layers"]
    return {one["layer"]: one[name] for one in layers if one.get(name) is not None}


def alone_table(cells: Found, explained: Found | None = None) -> str:
    """What a layer costs that is coded alone, beside what predictors would find of it."""
    usual = next((found for cell, found in explained or [] if cell["variant"] == "2 bits"), None)
    names = ("key_explained", "value_explained", "key_error_unpredicted", "key_error")
    figures = {name: {} if usual is None else _figure(usual, name) for name in names}
    rows = [
        [
            cell["cache"],
            str(cell["length"]),
            cell["variant"],
            str(one["layer"]),
            f"{one['ppl']:.3f}",
            _riseshown(one, found["full"]),
            *(shown(known.get(one["layer"]), ".3f") for known in figures.values()),
        ]
        for cell, found in cells
        for one in found["layers"]
    ]
    header = ["cache", "context", "coded alone", "layer", "perplexity", "rise", "keys explained"]
    header += ["values explained", "error of keys, nothing predicted", "error of keys"]
    return markdown_table(header, rows)


def _memory_table(cells: Found) -> str:
    """Bits a number of keys and values, on paper and of real tensors."""
    rows = []
    for cell, found in cells:
        for name, shape in SHAPES.items():
            paper = bits_on_paper(shape, PUBLISHED_TOKENS, cell["variant"])
            real = bits_measured(shape, found, PUBLISHED_TOKENS)
            measured = f"measured, {len(found['layers'])} layers, {found['tokens']} tokens"
            for how, bits in (("on paper", paper), (measured, real)):
                size = shape.gibibytes(PUBLISHED_TOKENS, bits["all"])
                rows.append(
                    [
                        name,
                        cell["variant"],
                        how,
                        *(f"{bits[kind]:.4f}" for kind in (*KINDS, "all")),
                        f"{size:.2f} of {shape.gibibytes(PUBLISHED_TOKENS):.0f}",
                    ]
                )
    header = ["shape", "predictors in", "bits a value", *KINDS, "all"]
    return markdown_table([*header, f"GiB at {PUBLISHED_TOKENS} tokens"], rows)


TABLES: dict[str, Callable[[Found], str]] = {
    "bits": _bits_table,
    "parts": _parts_table,
    "variance": _variance_tables,
    "layers": alone_table,
    "memory": _memory_table,
}
