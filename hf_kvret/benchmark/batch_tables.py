"""Tokens a second by batch as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.benchmark.opponents import DENSE
from hf_kvret.benchmark.tables import told_steps, why_missing
from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

# Full attention to all tokens, with keys and values in device memory.
_DENSE = ("full", "static", *DENSE)

_Rows = dict[tuple[int, str], dict[int, dict[str, Any]]]


def batch_table(results: Results) -> str:
    """Two tables: the best batch of each cache beside the best dense one, and all batches."""
    rows = _by_cache(results)
    return f"{_best_table(rows)}\n\n{_all_table(rows)}"


def best_batches(results: Results) -> dict[tuple[int, str], tuple[int, float]]:
    """By context and cache the batch with the most tokens a second, and how many these are."""
    found = {}
    for key, batches in _by_cache(results).items():
        best = _best(batches)
        if best is not None:
            found[key] = best, batches[best]["tokens_per_second"]
    return found


def plot_batches(path: Path, results: Results) -> None:
    """Tokens a second against the batch, a line for each cache and context."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for (context, cache), batches in _by_cache(results).items():
        measured = sorted((batch, row) for batch, row in batches.items() if "seconds" in row)
        if measured:
            xs = [float(batch) for batch, _ in measured]
            lines[f"{cache}, {context:,}"] = xs, [row["tokens_per_second"] for _, row in measured]
    title = f"{results.setup['shape']}: new tokens a second"
    plot_lines(path, lines, title=title, x="batch", y="tokens/s", log_x=True, log_y=True)


def _best_table(rows: _Rows) -> str:
    lines = []
    for (context, cache), batches in rows.items():
        best = _best(batches)
        dense = [
            others[top]["tokens_per_second"]
            for (length, name), others in rows.items()
            if length == context and name in _DENSE and (top := _best(others)) is not None
        ]
        if best is None:
            lines.append((cache, f"{context:,}", "0", "-", "-", "-"))
            continue
        rate = batches[best]["tokens_per_second"]
        over = f"{rate / max(dense):.2f}" if dense else "-"
        largest = max(batch for batch, row in batches.items() if "seconds" in row)
        lines.append((cache, f"{context:,}", str(largest), str(best), f"{rate:,.1f}", over))
    header = ("cache", "context", "largest batch", "best batch", "tokens/s", "over the best dense")
    return markdown_table(header, lines)


def _all_table(rows: _Rows) -> str:
    lines = []
    for (context, cache), batches in rows.items():
        for batch, row in sorted(batches.items()):
            start = [cache, f"{context:,}", str(batch), row["fill"]]
            if "seconds" not in row:
                lines.append([*start, "-", str(why_missing(row)), *"-----"])
                continue
            lines.append(
                [
                    *start,
                    f"{1e3 * row['seconds']:.3g}",
                    f"{row['tokens_per_second']:,.1f}",
                    f"{1e3 * row['floor_seconds']:.3g}",
                    f"{row['time_over_floor']:.1f}",
                    f"{row['device_peak_bytes'] / 1e6:,.1f}",
                    f"{row['host_bytes'] / 1e6:,.1f}",
                    told_steps(row),
                ]
            )
    header = ["cache", "context", "batch", "filled by", "ms a step", "tokens/s", "floor ms"]
    header += ["time / floor", "peak beyond weights MB", "cache host MB", "steps"]
    return markdown_table(header, lines)


def _by_cache(results: Results) -> _Rows:
    rows: _Rows = {}
    for cell, row in results:
        rows.setdefault((cell["context"], cell["cache"]), {})[cell["batch"]] = row
    return rows


def _best(batches: dict[int, dict[str, Any]]) -> int | None:
    measured = [batch for batch, row in batches.items() if "seconds" in row]
    return max(measured, key=lambda batch: batches[batch]["tokens_per_second"], default=None)
