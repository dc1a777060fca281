"""Rows of ``bench kernels`` as markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.tables import markdown_table

_HEADER = (
    "operation",
    "tokens",
    "batch",
    "way",
    "ms",
    "quartiles",
    "naive / it",
    "MB to move",
    "GB/s",
    "of bandwidth",
    "G mul-adds",
    "of products",
    "bound by",
    "floor ms",
    "time / floor",
    "sizes",
)


def kernels_table(results: Results) -> str:
    """A line for each operation, length, batch and way; what was not measured says why."""
    lines = []
    for cell, row in sorted(results, key=lambda entry: _place(results, entry[0])):
        first = (cell["op"], f"{cell['length']:,}", str(cell["batch"]), cell["cache"])
        if "seconds" not in row:
            lines.append((*first, row["out_of_memory"], *[""] * (len(_HEADER) - 5)))
            continue
        low, high = row["seconds_quartiles"]
        naive = results.find(cell | {"cache": "naive"}) or {}
        moved = row["read_bytes"] + row["written_bytes"]
        products = row["multiply_adds"]
        lines.append(
            (
                *first,
                _ms(row["seconds"]),
                f"{_ms(low)} to {_ms(high)}" if row["timed"] > 1 else "once",
                f"{naive['seconds'] / row['seconds']:.3g}" if "seconds" in naive else "-",
                f"{moved / 1e6:,.3g}" if moved < 1e9 else f"{moved / 1e6:,.0f}",
                _three(row["bytes_per_second"] / 1e9),
                f"{row['of_bandwidth']:.1%}",
                _three(products / 1e9) if products else "-",
                f"{row['of_products']:.1%}" if products else "-",
                row["bound"],
                _ms(row["floor_seconds"]),
                _three(row["seconds"] / row["floor_seconds"]),
                row["sizes"],
            )
        )
    return f"{_said(results)}\n\n{markdown_table(_HEADER, lines)}"


def plot_kernels(path: Path, results: Results) -> None:
    """Floor over time in percent: a group of bars an operation, a bar for each batch and length.

    Of the ways, the quickest but plain torch is shown, or plain torch where nothing else was
    measured.
    """
    shares: dict[str, dict[str, float]] = {}
    sizes: dict[tuple[int, int], str] = {}
    for cell, row in results:
        if "seconds" not in row or not _shown(results, cell):
            continue
        size = f"{cell['length']:,} tokens, batch {cell['batch']}"
        sizes[cell["batch"], cell["length"]] = size
        # Several short lines, so that neighbours don't run into each other.
        lines = "\n".join((cell["op"].replace(".", ".\n"), cell["cache"]))
        group = shares.setdefault(lines, {})
        group[size] = 100 * row["floor_seconds"] / row["seconds"]
    bars = {
        sizes[key]: [group.get(sizes[key]) for group in shares.values()] for key in sorted(sizes)
    }
    title = f"operations against their floors, {_where(results.setup)}"
    plot_groups(path, list(shares), bars, title=title, y="floor / time, %")


def _shown(results: Results, cell: Cell) -> bool:
    """Whether this way stands in the picture."""
    rivals = [
        (other["cache"] == "naive", row["seconds"], other["cache"])
        for other, row in results
        if "seconds" in row and other | {"cache": cell["cache"]} == cell
    ]
    return min(rivals)[2] == cell["cache"]


def _place(results: Results, cell: Cell) -> tuple[int, int, int]:
    """By operation in the order measured, then batch and length; ways stay in their order."""
    names = list(dict.fromkeys(other["op"] for other, _ in results))
    return names.index(cell["op"]), cell["batch"], cell["length"]


def _said(results: Results) -> str:
    setup = results.setup
    measured = [row for _, row in results if "seconds" in row]
    text = (
        f"{setup['heads']} KV heads of {setup['head_dim']} with {setup['group']} query heads each, "
        f"{setup['dtype']}; {_where(setup)}."
    )
    if not measured:
        return text
    bandwidths = [row["bandwidth"] / 1e9 for row in measured]
    products: dict[str, list[float]] = {}
    for row in measured:
        for name, rate in row["product_rates"].items():
            products.setdefault(name, []).append(rate / 1e9)
    rates = ", ".join(f"{_span(found)} G in {name}" for name, found in products.items())
    return f"{text} Bandwidth {_span(bandwidths)} GB/s; multiply-adds a second: {rates}."


def _span(values: list[float]) -> str:
    low, high = _three(min(values)), _three(max(values))
    return low if low == high else f"{low} to {high}"


def _where(setup: dict[str, Any]) -> str:
    if setup["device"] != "cpu":
        return str(setup["accelerator"] or setup["device"])
    return "1 thread" if setup["threads"] == 1 else f"{setup['threads']} threads"


def _ms(seconds: float) -> str:
    return _three(1e3 * seconds)


def _three(value: float) -> str:
    """Three digits that count, no powers of ten."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 1e-3 else f"{value:.2g}"
