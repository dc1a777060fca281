"""Results as text, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_kvret.evaluation.demo import DemoResult
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.plots import plot_shares

_BAR = 40


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = line(["-" * width for width in widths])
    return "\n".join([line(header), rule, *map(line, rows)])


def demo_table(results: Sequence[DemoResult]) -> str:
    """The demo's results, one row a cache."""
    header = (
        "cache",
        "answers right",
        "new tokens/s",
        "prefill s",
        "device MB",
        "host MB",
        "device / full K,V",
        "cold rows read",
        "recall@k",
        "attention mass",
    )
    rows = [
        (
            row.cache,
            f"{row.right_ratio:.1%}",
            f"{row.tokens_per_second:.1f}",
            f"{row.prefill_seconds:.1f}",
            f"{row.device_bytes / 1e6:.1f}",
            f"{row.host_bytes / 1e6:.1f}",
            f"{row.device_bytes / row.full_bytes:.1%}",
            f"{row.read_ratio:.2%}",
            "-" if row.recall is None else f"{row.recall:.3f}",
            "-" if row.mass is None else f"{row.mass:.3f}",
        )
        for row in results
    ]
    return markdown_table(header, rows)


def layer_table(results: Sequence[DemoResult]) -> str:
    """Recall of the exact top-k and attention mass by layer, for caches that retrieve."""
    numbers = sorted({number for row in results for number in row.recall_by_layer})
    header = ("recall / mass", *(f"layer {number}" for number in numbers))
    rows = [
        (
            row.cache,
            *(f"{row.recall_by_layer[n]:.3f} / {row.mass_by_layer[n]:.3f}" for n in numbers),
        )
        for row in results
        if row.recall_by_layer
    ]
    return markdown_table(header, rows)


def demo_bars(results: Sequence[DemoResult]) -> str:
    """The demo as a picture in text: answers right, and bytes on the device against full."""
    lines, width = [], max(8, *(len(row.cache) for row in results))
    for title, shares in (
        ("answers right", [row.right_ratio for row in results]),
        ("device bytes, of full K,V", [row.device_bytes / row.full_bytes for row in results]),
        ("cold rows read", [row.read_ratio for row in results]),
    ):
        lines.append(title)
        for row, share in zip(results, shares, strict=True):
            filled = min(_BAR, round(share * _BAR))
            bar = "█" * filled + "·" * (_BAR - filled)
            lines.append(f"  {row.cache:>{width}} {bar} {share:.1%}")
    return "\n".join(lines)


def write_json(path: Path, name: str, setup: dict[str, Any], results: Sequence[Any]) -> None:
    """Write results with the command, machine and versions that made them."""
    content = {
        "name": name,
        "setup": setup,
        "environment": describe_environment(),
        "results": [result.to_dict() for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot_demo(path: Path, results: Sequence[DemoResult], context: int) -> None:
    """Write the demo's picture: answers, device bytes and rows read, a bar for each cache.

    Raises:
        ModuleNotFoundError: matplotlib is missing; names the extra that brings it.
    """
    panels = {
        "answers right": [row.right_ratio for row in results],
        "device bytes / full K,V": [row.device_bytes / row.full_bytes for row in results],
        "cold rows read": [row.read_ratio for row in results],
    }
    names = [row.cache for row in results]
    plot_shares(path, names, panels, title=f"{context:,} tokens of context")
