"""How a tuning looks: the front as a table, the choice to paste, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.lab.tune.selection import FULL, Chosen, Measured, choose, collect, finalists, front
from hf_kvret.saved.folder import replace_file

_HEADER = (
    *("cache", "tokens", "agreement, %", "KL", "MB a step", "of full", "device MB", "ms a step"),
)


def choice_of(results: Results) -> Chosen:
    """The choice of a tuning; of one that is not finished there is none."""
    return choose(finalists(results) or [], results.setup["agreement"])


def configuration(results: Results, name: str) -> dict[str, Any]:
    """``cache_implementation`` and ``cache_config`` of a variant, as ``generate`` takes them."""
    row = next(row for cell, row in results if cell["cache"] == name)
    return {"cache_implementation": row["method"], "cache_config": row["cache_config"]}


def write_choice(path: Path, results: Results) -> str | None:
    """Write the configuration of the choice as JSON; returns its text, None without a choice."""
    chosen = choice_of(results).variant
    if chosen is None:
        return None
    text = json.dumps(configuration(results, chosen.name), indent=1)
    replace_file(path, f"{text}\n".encode())
    return text


def shown(results: Results) -> str:
    """The front and the choice as a markdown table, the others in a line, the choice to paste."""
    measured = collect(results)
    variants = _variants(measured)
    if FULL not in measured or not variants:
        why = (row["out_of_memory"] for _, row in results if "out_of_memory" in row)
        return f"Nothing was compared with full attention{next((f': {x}' for x in why), '')}."
    full, chosen = measured[FULL], choice_of(results)
    best = front(variants)
    # What beats the choice was measured on less.
    if chosen.variant is not None and chosen.variant not in best:
        best = sorted([*best, chosen.variant], key=lambda one: one.cost)
    rows = [_line(one, full, one == chosen.variant) for one in (full, *best)]
    others = _others(results, variants, best)
    parts = [markdown_table(_HEADER, rows), *others, *_told(results, chosen, full)]
    return "\n\n".join(parts)


def picture(path: Path, results: Results) -> None:
    """Agreement against bytes a step, a line for each filled cache and rest."""
    measured = collect(results)
    full = measured[FULL].step_bytes if FULL in measured else 1.0
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for one in sorted(_variants(measured), key=lambda one: one.cost):
        name = ":".join(
            part for part in one.name.split(":") if not part.startswith(("top_k=", "dense_below="))
        )
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(100 * one.step_bytes / full)
        ys.append(100 * one.agreement)
    plot_lines(
        path,
        lines,
        title=f"{results.setup['model']}, {results.setup['context']:,} tokens",
        x="bytes of the cache that a step reads, % of full attention's",
        y="agreement with full attention, %",
        log_x=True,
    )


def _variants(measured: Mapping[str, Measured]) -> list[Measured]:
    return [one for name, one in measured.items() if name != FULL]


def _line(one: Measured, full: Measured, is_chosen: bool) -> list[str]:
    return [
        f"**{one.name}**" if is_chosen else one.name,
        str(one.tokens),
        "100" if one is full else f"{100 * one.agreement:.2f} ± {100 * one.agreement_error:.2f}",
        "0" if one is full else f"{one.kl:.1e} ± {one.kl_error:.0e}",
        f"{one.step_bytes / 1e6:.4g}",
        f"{one.step_bytes / full.step_bytes:.1%}",
        f"{one.device_bytes / 1e6:.4g}",
        f"{one.ms:.3g}",
    ]


def _others(results: Results, variants: Sequence[Measured], best: Sequence[Measured]) -> list[str]:
    count = len(variants) - len(best)
    stopped = sum(len(one.rows) < results.setup["windows"] for one in variants)
    missing = {cell["cache"] for cell, row in results if "out_of_memory" in row}
    told = f"± is a standard error. {len(best)} of {len(variants)} variants are shown"
    if count:
        told += "; each other one is beaten in agreement, bytes or time, and nowhere better"
    if stopped:
        told += f". {stopped} were measured on fewer tokens, as others were likelier to be chosen"
    if missing:
        told += f". Out of memory: {', '.join(sorted(missing))}"
    return [f"{told}."]


def _told(results: Results, chosen: Chosen, full: Measured) -> list[str]:
    """The choice in words, and its configuration."""
    one = chosen.variant
    if one is None:
        return ["Not finished: nothing is chosen yet."]
    goal = f"an agreement of {results.setup['agreement']:.4g}"
    start = {
        "sure": f"The cheapest with {goal}, a standard error to spare",
        "mean": f"The cheapest with {goal}, though by less than a standard error (more --tokens "
        "make it surer)",
        "missed": f"MISSED: no variant has {goal}; try larger --top-k, other --methods, or a lower "
        "--agreement, or stay with full attention. The nearest one",
    }[chosen.certainty]
    told = (
        f"{start}: **{one.name}**, {one.agreement:.4f} ± {one.agreement_error:.4f} over "
        f"{one.tokens} tokens, {one.step_bytes / full.step_bytes:.1%} of the bytes that full "
        "attention reads a step."
    )
    if one.step_bytes >= full.step_bytes:
        told += " That is no less than full attention reads: it is better used without a cache."
    return [told, f"```json\n{json.dumps(configuration(results, one.name))}\n```"]
