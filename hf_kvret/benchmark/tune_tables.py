"""Rows of ``bench tune`` as markdown and as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.tables import markdown_table

_HEADER = (
    "operation",
    "tokens",
    "batch",
    "rows",
    "rule ms",
    "best ms",
    "rule / best",
    "taken",
    "what is other than in the rule",
    "ms by variant",
    "tried",
    "refused",
)


def tune_table(results: Results) -> str:
    """A line for each operation and size; what was not measured says why."""
    lines = []
    for cell, row in results:
        first = (
            cell["op"],
            f"{cell['length']:,}",
            str(cell["batch"]),
            cell["cache"].removeprefix("rows on "),
        )
        if "size" not in row:
            lines.append((*first, row["out_of_memory"], *[""] * (len(_HEADER) - 5)))
            continue
        lines.append(
            (
                *first,
                _ms(row["rule_seconds"]),
                _ms(row["best_seconds"]),
                f"{row['ratio']:.3f}",
                "best" if row["worth_it"] else "rule",
                _changes(row),
                _variants(row["timed"]),
                str(len(row["timed"])),
                str(len(row["refused"])),
            )
        )
    return f"{_said(results.setup)}\n\n{markdown_table(_HEADER, lines)}"


def plot_tune(path: Path, results: Results) -> None:
    """Time of the rule over time of the best: a group of bars a size, a bar an operation."""
    sizes = list(dict.fromkeys(_size(cell) for cell, _ in results))
    bars: dict[str, list[float | None]] = {}
    for cell, row in results:
        name = f"{cell['op']}, {cell['cache']}"
        values = bars.setdefault(name, [None] * len(sizes))
        values[sizes.index(_size(cell))] = row.get("ratio")
    title = f"launches as measured against rules, {_where(results.setup)}"
    plot_groups(path, sizes, bars, title=title, y="time of the rule / time of the best")


def _changes(row: dict[str, Any]) -> str:
    other = [f"{name}={value}" for name, value in row["best"].items() if row["rule"][name] != value]
    return ", ".join(other) or "-"


def _variants(timed: dict[str, float]) -> str:
    """The least time of each variant, as far as it was tried; ``-`` without variants."""
    least: dict[str, float] = {}
    for choice, seconds in timed.items():
        found = re.search(r"variant=(\w+)", choice)
        if found:
            least[found[1]] = min(seconds, least.get(found[1], seconds))
    return ", ".join(f"{name} {_ms(seconds)}" for name, seconds in least.items()) or "-"


def _said(setup: dict[str, Any]) -> str:
    text = (
        f"{setup['heads']} KV heads of {setup['head_dim']} with {setup['group']} query heads each, "
        f"{setup['dtype']}; stores of {setup['cold']:,} tokens; {_where(setup)}. The best is taken "
        f"where it beats the rule by {setup['margin']:.0%}, in the median of {setup['repeats']} "
        "calls."
    )
    if setup["device"] == "cpu":
        text += " Triton ran in its interpreter: these times say nothing about a GPU."
    return text


def _where(setup: dict[str, Any]) -> str:
    return str(setup["accelerator"] or setup["device"])


def _size(cell: Cell) -> str:
    return f"{cell['length']:,} tokens,\nbatch {cell['batch']}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
