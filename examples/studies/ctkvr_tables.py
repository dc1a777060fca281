"""The tables and pictures of ``ctkvr-ablation``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from study_tables import Found, bars_of, by_length, curves_of, stretches_of

from hf_kvret.evaluation.stretches import mean_of, share
from hf_kvret.evaluation.tables import markdown_table

# Parts with one number a variant, and what their variants are.
PLAIN = {
    "choice": "centroids",
    "centroids": "C, centroids",
    "probes": "C', recalled centroids",
    "rerank": "rerank",
    "budget": "budget",
    "questions": "question's centroids",
}
# The paper's accuracies, of other models on other tasks: where, and by variant.
_PAPER: dict[str, tuple[str, dict[str, str]]] = {
    "choice": ("table 4", {"last": "83.35", "random": "79.93", "first": "75.60", "even": "81.98"}),
    "probes": ("table 15", {"2": "0.8854", "4": "0.8958", "6": "0.8988", "8": "0.8990"}),
    "budget": ("tables 1 and 6", {"512": "84.70", "1024": "85.25", "0.04": "85.58"}),
}
_PLACES = {"prompt_recall": "of the prompt", "generated_recall": "that were generated"}
_KINDS = ("recall", "mass", "tokens equal", "candidates", "rows read", "candidates / read")


def _plain_table(cells: Found) -> str:
    """A row a variant, columns for each length."""
    part = cells[0][0]["part"]
    columns, rows = by_length(cells, _KINDS if part == "rerank" else _KINDS[:-1])
    header = ["cache", PLAIN[part], *columns]
    source, figures = _PAPER.get(part, ("", {}))
    if figures:
        header.append(f"paper's accuracy, {source}")
        rows = {key: [*row, figures.get(key[1], "-")] for key, row in rows.items()}
    return markdown_table(header, [[*key, *row] for key, row in rows.items()])


def _turns_table(cells: Found) -> str:
    """Recall by turn (the paper's table 5)."""
    most = max(len(found["stretches"]) for _, found in cells)
    rows = []
    for cell, found in cells:
        turns = [share(one["overlap"]) for one in found["stretches"]]
        turns += ["-"] * (most - len(turns))
        mass = f"{found['mass']:.3f} of {found['best_mass']:.3f}"
        means = (share(found["overlap"]), mass, share(found["equal"]), str(found["list_builds"]))
        rows.append([cell["cache"], cell["variant"], str(cell["length"]), *turns, *means])
    turns = [f"turn {number + 1}" for number in range(most)]
    names = ("recall, mean", "mass, mean", "tokens equal", "times lists were made")
    return markdown_table(["cache", "update", "context", *turns, *names], rows)


def _long_tables(cells: Found) -> str:
    """Recall along the generation, of tokens in either place."""
    ends = sorted({one["end"] for _, found in cells for one in found["stretches"]})
    tables = []
    for name, place in _PLACES.items():
        rows = []
        for cell, found in cells:
            known = {one["end"]: share(one[name]) for one in found["stretches"]}
            row = [cell["cache"], cell["variant"], str(cell["length"])]
            row += [known.get(end, "-") for end in ends]
            mean, builds = share(mean_of(found["stretches"], name)), str(found["list_builds"])
            rows.append([*row, mean, builds])
        header = ["cache", f"recall of tokens {place}", "context", *(f"to {end}" for end in ends)]
        tables.append(markdown_table([*header, "mean", "times lists were made"], rows))
    return "\n\n".join(tables)


def _plot_long(name: str) -> Callable[[Path, Found], None]:
    title = f"CTkvr: tokens {_PLACES[name]}"
    return stretches_of(title, x="tokens after the prompt", name=name, low=-0.03)


TABLES: dict[str, Callable[[Found], str]] = {
    **dict.fromkeys(PLAIN, _plain_table),
    "update": _turns_table,
    "pending": _long_tables,
}
PLOTS: dict[str, tuple[str, Callable[[Path, Found], None]]] = {
    **{part: (part, bars_of(f"CTkvr: {title}")) for part, title in PLAIN.items()},
    "rerank": (
        "rerank",
        curves_of(
            "CTkvr: how recalled tokens are compared",
            x="candidates, share of cold",
            y="recall",
            names=("candidate_ratio", "overlap"),
        ),
    ),
    "update": (
        "update",
        stretches_of("CTkvr: new centroids over turns", x="turn", numbered=True),
    ),
    "pending": ("pending", _plot_long("prompt_recall")),
    "generated": ("pending", _plot_long("generated_recall")),
}
