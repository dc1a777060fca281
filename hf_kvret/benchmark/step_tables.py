"""Parts of a decode step as tables and as a picture."""

from __future__ import annotations

from pathlib import Path

from hf_kvret.benchmark.step_parts import PARTS
from hf_kvret.benchmark.tables import why_missing
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

_SIZE = ("cache", "context", "batch")


def step_table(results: Results) -> str:
    """A table of whole steps, one of their parts, and where the host waits."""
    header = [*_SIZE, "ms a step, eager", "busy ms", "busy", "launches", "launches a layer"]
    header += ["waits", "later steps", "their waits"]
    whole, parts, notes = [], [], []
    for cell, row in results:
        size = [cell["cache"], f"{cell['context']:,}", str(cell["batch"])]
        missing = why_missing(row)
        if missing is not None:
            whole.append([*size, missing, *"-------"])
            continue
        whole.append(
            [
                *size,
                _ms(row["seconds"]),
                _ms(row["busy_seconds"]),
                f"{row['busy_seconds'] / row['seconds']:.0%}",
                f"{row['launches']:g}",
                f"{row['launches_a_layer']:.1f}",
                str(row["waits"]),
                row["later_kind"],
                str(row["later_waits"]),
            ]
        )
        known = row["parts"]
        parts.append([*size, *(_part(known.get(name)) for name in PARTS)])
        places = row["wait_places"] | row["later_wait_places"]
        notes += [f"- {cell['cache']}, {cell['context']:,}: waits in {place}" for place in places]
    are = {row["launches_are"] for _, row in results if "launches_are" in row}
    notes += [f"- launches are {one}" for one in sorted(are)]
    tables = [
        markdown_table(header, whole),
        "Milliseconds at work (launches) of each part:",
        markdown_table([*_SIZE, *PARTS], parts),
        "\n".join(notes),
    ]
    return "\n\n".join(part for part in tables if part)


def plot_parts(path: Path, results: Results) -> None:
    """Milliseconds of the parts: a group of bars a part, a bar for each cache and size."""
    bars = {
        f"{cell['cache']}, {cell['context']:,} x {cell['batch']}": [
            1e3 * row["parts"][name]["seconds"] if name in row["parts"] else None for name in PARTS
        ]
        for cell, row in results
        if "parts" in row
    }
    title = f"{results.setup['shape']}: parts of a decode step"
    plot_groups(path, PARTS, bars, title=title, y="ms")


def _part(part: dict[str, float] | None) -> str:
    return "-" if part is None else f"{_ms(part['seconds'])} ({part['launches']:g})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
