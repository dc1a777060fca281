"""Table and picture of what it gives that tokens which are not selected count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study_tables import Found, Plot, Table

from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.tables import markdown_table


def _by_way(cells: Found) -> dict[tuple[str, str, str], dict[float, dict[str, Any]]]:
    """Results by cache, length and what stands for the rest, then by share of rows."""
    ways: dict[tuple[str, str, str], dict[float, dict[str, Any]]] = {}
    for cell, result in cells:
        share, rest = cell["variant"].split(", ")
        key = cell["cache"], str(cell["length"]), rest
        ways.setdefault(key, {})[float(share)] = result
    return ways


def _table(cells: Found) -> str:
    ways = _by_way(cells)
    shares = sorted({share for results in ways.values() for share in results})
    header = ["cache", "context", "for the rest"]
    header += [f"{share:.0%}: KL +- s.e., equal" for share in shares]
    lines = []
    for way, results in ways.items():
        found = [results.get(share) for share in shares]
        lines.append(
            [
                *way,
                *(
                    "-"
                    if one is None
                    else f"{one['kl']:.3g} +- {one['kl_error']:.1g}, {one['equal']:.1%}"
                    for one in found
                ),
            ]
        )
    lost = [
        [*way[:2], *(f"{results[share]['lost']:.3f}" for share in shares if share in results)]
        for way, results in ways.items()
        if len(results) == len(shares) and way[2] == next(iter(ways))[2]
    ]
    head = ["cache", "context", *(f"{share:.0%}: mass of the cold ones lost" for share in shares)]
    tables = [markdown_table(header, lines)]
    if lost:
        tables.append(markdown_table(head, lost))
    if estimates := _estimates(ways, shares):
        tables.append(estimates)
    return "\n\n".join(tables)


def _estimates(
    ways: Mapping[tuple[str, str, str], Mapping[float, Mapping[str, Any]]], shares: Sequence[float]
) -> str:
    """Lost mass as indexes estimate it, beside the exact one; empty where nobody did."""
    lines = []
    for way, results in ways.items():
        found = [results.get(share, {}) for share in shares]
        if any(one.get("estimated") is not None for one in found):
            lines.append(
                [
                    *way,
                    *(
                        "-"
                        if one.get("estimated") is None
                        else f"{one['estimated']:.3f}, {one['lost_of_all']:.3f}"
                        for one in found
                    ),
                ]
            )
    head = [f"{share:.0%}: share of all attention lost, estimated, exact" for share in shares]
    return markdown_table(["cache", "context", "for the rest", *head], lines) if lines else ""


def _plot(path: Path, cells: Found) -> None:
    ways = _by_way(cells)
    longest = max((length for _, length, _ in ways), key=int)
    lines, kinds = {}, []
    for (cache, length, rest), results in ways.items():
        if length == longest:
            points = [results[share] for share in sorted(results)]
            shares = [one["step_bytes"] / one["full_bytes"] for one in points]
            # Artifacts' folders are long names.
            kinds.append((cache.partition(":artifact=")[0], rest))
            lines[", ".join(kinds[-1])] = shares, [one["kl"] for one in points]
    plot_lines(
        path,
        lines,
        title=f"divergence from full attention, {int(longest):,} tokens of context",
        x="bytes that a step reads, share of full attention's",
        y="KL, nats",
        log_x=True,
        log_y=True,
        kinds=kinds,
    )


TABLES: Mapping[str, Table] = {"tokens": _table}
PLOTS: Mapping[str, Plot] = {"tokens": _plot}
DRAWN: Mapping[str, str] = {}
