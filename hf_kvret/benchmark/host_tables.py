"""Rows of ``bench host-attention`` as markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.benchmark.host_torch import TORCH_WAYS
from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

_HEADER = (
    "dtype",
    "batch",
    "k",
    "cpp ms",
    "quartiles",
    "torch ms",
    "quartiles",
    "torch is",
    "torch / cpp",
    "of the least",
    "naive ms",
    "cpp GB/s",
    "of sequential",
    "sequential GB/s",
    "random rows GB/s",
    "path",
)


def host_table(results: Results) -> str:
    """A line for each dtype, batch and k; ``torch`` is its quickest way there.

    ``torch / cpp`` is of the medians, ``of the least`` of the quickest calls. Where they are far
    apart, other programs had the processors.
    """
    lines = []
    for (dtype, batch, k), ways in _by_size(results).items():
        cpp, naive = ways["cpp"], ways["naive"]
        name, best = _quickest_torch(ways)
        held = cpp["sequences_held"]
        lines.append(
            (
                dtype,
                str(batch) if held == batch else f"{batch} (rows of {held})",
                f"{k:,}",
                _ms(cpp["seconds"]),
                _quartiles(cpp),
                _ms(best["seconds"]),
                _quartiles(best),
                name,
                f"{best['seconds'] / cpp['seconds']:.2f}",
                f"{best['seconds_least'] / cpp['seconds_least']:.2f}",
                _ms(naive["seconds"]),
                _gb(cpp["bytes_per_second"]),
                f"{cpp['of_sequential']:.0%}",
                _gb(cpp["sequential_bandwidth"]),
                _gb(cpp["random_row_bandwidth"]),
                results.setup["path"],
            )
        )
    setup = results.setup
    return (
        f"{setup['tokens']:,} tokens, {setup['heads']} KV heads of {setup['dim']} with "
        f"{setup['group']} query heads each, {_threads(results)}.\n\n"
        f"{markdown_table(_HEADER, lines)}"
    )


def plot_host(path: Path, results: Results) -> None:
    """Milliseconds against k, two lines for each dtype and batch."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    sizes = _by_size(results)
    batches = {batch for _, batch, _ in sizes}
    for (dtype, batch, k), ways in sorted(sizes.items()):
        suffix = dtype if len(batches) == 1 else f"{dtype}, batch {batch}"
        for name, row in (("cpp", ways["cpp"]), ("torch", _quickest_torch(ways)[1])):
            xs, ys = lines.setdefault(f"{name}, {suffix}", ([], []))
            xs.append(float(k))
            ys.append(1e3 * row["seconds"])
    title = f"attention over chosen rows in host memory, {_threads(results)}"
    plot_lines(path, lines, title=title, x="rows of a head", y="ms", log_x=True, log_y=True)


def _by_size(results: Results) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """Rows by way, by dtype, batch and k; sizes that lack a way are left out."""
    found: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for cell, row in results:
        found.setdefault((cell["dtype"], cell["batch"], cell["k"]), {})[cell["cache"]] = row
    return {size: ways for size, ways in found.items() if {"cpp", "naive", *TORCH_WAYS} <= {*ways}}


def _quickest_torch(ways: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    return min(((name, ways[name]) for name in TORCH_WAYS), key=lambda one: one[1]["seconds"])


def _threads(results: Results) -> str:
    count = results.setup["threads"]
    return "1 thread" if count == 1 else f"{count} threads"


def _quartiles(row: dict[str, Any]) -> str:
    low, high = row["seconds_quartiles"]
    return f"{_ms(low)} to {_ms(high)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
