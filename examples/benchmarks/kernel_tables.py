"""Rows of ``bench kernels`` as markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import turns

from hf_kvret.benchmark import timed
from hf_kvret.evaluation.measurement import Row
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results


def kernels_table(results: Results) -> str:
    """A line for each operation, length, batch and way, with the machine's rates above."""
    ops = list(dict.fromkeys(cell["op"] for cell, _ in results))

    def place(entry: tuple[Cell, Row]) -> tuple[int, int, int]:
        return ops.index(entry[0]["op"]), entry[0]["batch"], entry[0]["length"]

    def times(cell: Cell, row: Row) -> str:
        naive = results.find(cell | {"cache": "naive"}) or {}
        return f"{naive['seconds'] / row['seconds']:.3g}" if "seconds" in naive else "-"

    columns: tuple[timed.Column, ...] = (
        ("operation", lambda cell, row: cell["op"]),
        ("tokens", lambda cell, row: f"{cell['length']:,}"),
        ("batch", lambda cell, row: str(cell["batch"])),
        ("way", lambda cell, row: cell["cache"]),
        ("ms", lambda cell, row: _ms(row["seconds"])),
        ("quartiles", lambda cell, row: timed.spread(row, _ms)),
        ("naive / it", times),
        ("MB to move", lambda cell, row: _megabytes(row["read_bytes"] + row["written_bytes"])),
        ("GB/s", lambda cell, row: _three(row["bytes_per_second"] / 1e9)),
        ("of bandwidth", lambda cell, row: f"{row['of_bandwidth']:.1%}"),
        ("G mul-adds", lambda cell, row: _some(row, _three(row["multiply_adds"] / 1e9))),
        ("of products", lambda cell, row: _some(row, f"{row['of_products']:.1%}")),
        ("bound by", lambda cell, row: row["bound"]),
        ("floor ms", lambda cell, row: _ms(row["floor_seconds"])),
        ("time / floor", lambda cell, row: _three(row["seconds"] / row["floor_seconds"])),
        ("sizes", lambda cell, row: row["sizes"]),
    )
    return timed.rows_table(columns, sorted(results, key=place), 4, _said(results))


def plot_kernels(path: Path, results: Results) -> None:
    """Floor over time in percent: a group of bars an operation, a bar for each size.

    Of the ways, the quickest but plain torch is shown, or plain torch where nothing else was
    measured.
    """
    shares: dict[str, dict[tuple[int, int], float]] = {}
    for cell, row in results:
        if "seconds" in row and _is_shown(results, cell):
            # Several short lines, so that neighbours don't run into each other.
            lines = "\n".join((cell["op"].replace(".", ".\n"), cell["cache"]))
            share = 100 * row["floor_seconds"] / row["seconds"]
            shares.setdefault(lines, {})[cell["batch"], cell["length"]] = share
    bars = {
        f"{length:,} tokens, batch {batch}": [
            group.get((batch, length)) for group in shares.values()
        ]
        for batch, length in sorted({size for group in shares.values() for size in group})
    }
    title = f"operations against their floors, {_where(results.setup)}"
    plot_groups(path, list(shares), bars, title=title, y="floor / time, %")


def _is_shown(results: Results, cell: Cell) -> bool:
    """Whether this way stands in the picture."""
    rivals = [
        (other["cache"] == "naive", row["seconds"], other["cache"])
        for other, row in results
        if "seconds" in row and turns.size_of(other) == turns.size_of(cell)
    ]
    return min(rivals)[2] == cell["cache"]


def _said(results: Results) -> str:
    setup = results.setup
    text = (
        f"{setup['heads']} KV heads of {setup['head_dim']} with {setup['group']} query heads each, "
        f"{setup['dtype']}; {_where(setup)}."
    )
    measured = [row for _, row in results if "seconds" in row]
    if not measured:
        return text
    products: dict[str, list[float]] = {}
    for row in measured:
        for name, rate in row["product_rates"].items():
            products.setdefault(name, []).append(rate)
    rates = ", ".join(f"{_span(found)} G in {name}" for name, found in products.items())
    bandwidth = _span([row["bandwidth"] for row in measured])
    return f"{text} Bandwidth {bandwidth} GB/s; multiply-adds a second: {rates}."


def _where(setup: dict[str, Any]) -> str:
    if setup["device"] != "cpu":
        return str(setup["accelerator"] or setup["device"])
    return timed.thread_count(setup["threads"])


def _span(rates: list[float]) -> str:
    """In billions."""
    low, high = _three(min(rates) / 1e9), _three(max(rates) / 1e9)
    return low if low == high else f"{low} to {high}"


def _some(row: Row, text: str) -> str:
    return text if row["multiply_adds"] else "-"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"


def _ms(seconds: float) -> str:
    return _three(1e3 * seconds)


def _three(value: float) -> str:
    """Three digits that count, no powers of ten."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 1e-3 else f"{value:.2g}"
