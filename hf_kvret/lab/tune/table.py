"""The results of a tuning: the front as a table, the choice to paste, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.plots import plot_lines, series
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.lab.tune.selection import FULL, Measured, choose, collect, finalists, front
from hf_kvret.saved.folder import replace_file

_HEADER = (
    *("cache", "tokens", "agreement, %", "KL", "MB a step", "of full", "device MB", "ms a step"),
)


def configuration(results: Results, name: str) -> dict[str, Any]:
    """``cache_implementation`` and ``cache_config`` of a variant, as ``generate`` takes them."""
    row = next(row for cell, row in results if cell["cache"] == name)
    return {"cache_implementation": row["method"], "cache_config": row["cache_config"]}


def write_choice(path: Path, results: Results) -> bool:
    """Write the configuration of the choice as JSON; returns whether there is one."""
    choice, _ = _choice(results)
    if choice is not None:
        text = json.dumps(configuration(results, choice.name), indent=1)
        replace_file(path, f"{text}\n".encode())
    return choice is not None


def tuning_text(results: Results) -> str:
    """The front and the choice as a markdown table, the others in a line, the choice to paste."""
    measured = collect(results)
    variants = _variants(measured)
    if FULL not in measured or not variants:
        why = (row["out_of_memory"] for _, row in results if "out_of_memory" in row)
        return f"Nothing was compared with full attention{next((f': {x}' for x in why), '')}."
    full, best = measured[FULL], front(variants)
    choice, certainty = _choice(results)
    # One that is cheaper and agrees more may have been measured on fewer windows.
    if choice is not None and choice not in best:
        best = sorted([*best, choice], key=lambda one: one.cost)
    rows = [_line(one, full, one == choice) for one in (full, *best)]
    paragraphs = [markdown_table(_HEADER, rows), _remarks(results, variants, best)]
    if choice is None:
        return "\n\n".join([*paragraphs, "Not finished: nothing is chosen yet."])
    return "\n\n".join([*paragraphs, *_choice_text(results, choice, certainty, full)])


def draw_tuning(path: Path, results: Results) -> None:
    """Agreement against bytes a step, a line for each filled cache and rest."""
    measured = collect(results)
    full = measured[FULL].step_bytes if FULL in measured else 1.0
    points = [
        (_without_budget(one.name), 100 * one.step_bytes / full, 100 * one.agreement)
        for one in sorted(_variants(measured), key=lambda one: one.cost)
    ]
    plot_lines(
        path,
        series(points),
        title=f"{results.setup['model']}, {results.setup['context']:,} tokens",
        x="bytes of the cache that a step reads, % of full attention's",
        y="agreement with full attention, %",
        log_x=True,
    )


def _choice(results: Results) -> tuple[Measured | None, str]:
    """The choice of a tuning; of one that is not finished there is none."""
    return choose(finalists(results), results.setup["agreement"])


def _without_budget(name: str) -> str:
    options = name.split(":")
    return ":".join(text for text in options if not text.startswith(("top_k=", "dense_below=")))


def _variants(measured: Mapping[str, Measured]) -> list[Measured]:
    return [one for name, one in measured.items() if name != FULL]


def _line(one: Measured, full: Measured, is_choice: bool) -> list[str]:
    return [
        f"**{one.name}**" if is_choice else one.name,
        str(one.tokens),
        "100" if one is full else f"{100 * one.agreement:.2f} ± {100 * one.agreement_error:.2f}",
        "0" if one is full else f"{one.kl:.1e}",
        f"{one.step_bytes / 1e6:.4g}",
        f"{one.step_bytes / full.step_bytes:.1%}",
        f"{one.device_bytes / 1e6:.4g}",
        f"{one.ms:.3g}",
    ]


def _remarks(results: Results, variants: Sequence[Measured], best: Sequence[Measured]) -> str:
    stopped = sum(len(one.rows) < results.setup["windows"] for one in variants)
    missing = {cell["cache"] for cell, row in results if "out_of_memory" in row}
    text = f"± is a standard error. {len(best)} of {len(variants)} variants are shown"
    if len(variants) > len(best):
        text += "; each other one agrees no more than one that is cheaper"
    if stopped:
        text += f". {stopped} were measured on fewer tokens, as they could not be chosen any more"
    if missing:
        text += f". Out of memory: {', '.join(sorted(missing))}"
    return f"{text}."


def _choice_text(results: Results, one: Measured, certainty: str, full: Measured) -> list[str]:
    """The choice in words, and its configuration."""
    goal = f"an agreement of {results.setup['agreement']:.4g}"
    start = {
        "sure": f"The cheapest with {goal}, a standard error to spare",
        "mean": f"The cheapest with {goal}, though by less than a standard error (more --tokens "
        "make it surer)",
        "missed": f"MISSED: no variant has {goal}; try larger --top-k, other --methods, or a lower "
        "--agreement, or stay with full attention. The nearest one",
    }[certainty]
    text = (
        f"{start}: **{one.name}**, {one.agreement:.4f} ± {one.agreement_error:.4f} over "
        f"{one.tokens} tokens, {one.step_bytes / full.step_bytes:.1%} of the bytes that full "
        "attention reads a step."
    )
    if one.step_bytes >= full.step_bytes:
        text += " That is no less than full attention reads: it is better used without a cache."
    return [text, f"```json\n{json.dumps(configuration(results, one.name))}\n```"]
