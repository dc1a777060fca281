"""The variants that go on, the front, the choice, and all of it as text and picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.plots import plot_lines, series
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table, or_dash
from hf_kvret.saved.folder import replace_file

FULL = "full"
"""The name of full attention among caches."""

# Standard errors from the target, beyond which further windows would be in vain.
_FAR = 3.0
# Shares of windows spread 1.2 to 1.5 times as much on WikiText-2 as shares of as many independent
# tokens.
_TEXT = 1.5


@dataclass(frozen=True)
class Measured:
    """The measurements of a variant: a row for each window, from the first one on without a gap."""

    name: str
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """Tokens that were foretold in all windows."""
        return sum(row["tokens"] for row in self.rows)

    @property
    def agreement(self) -> float:
        """Share of tokens that are full attention's first choice too."""
        return sum(row["equal"] for row in self.rows) / self.tokens

    @property
    def agreement_error(self) -> float:
        """Standard error of ``agreement``."""
        return self._error_at(self.agreement)

    @property
    def kl(self) -> float | None:
        """KL(full || variant), mean over tokens, in nats; None where it is no number."""
        kls = [row["kl"] for row in self.rows]
        return None if None in kls else sum(kls) / self.tokens

    @property
    def step_bytes(self) -> float:
        """Bytes of the cache that a step reads, mean over windows."""
        return fmean(row["step_bytes"] for row in self.rows)

    @property
    def device_bytes(self) -> float:
        """Bytes of the cache on the device, mean over windows."""
        return fmean(row["device_bytes"] for row in self.rows)

    @property
    def ms(self) -> float:
        """Milliseconds of a step, mean over the windows' medians."""
        return fmean(row["ms"] for row in self.rows)

    @property
    def cost(self) -> tuple[float, float]:
        """Less is cheaper: bytes, then time."""
        return self.step_bytes, self.ms

    def surplus(self, target: float) -> float:
        """The agreement over ``target``, in standard errors that it would have at ``target``.

        The error at its own agreement would be near 0 where one window has been kind to it.
        """
        return (self.agreement - target) / self._error_at(target)

    def _error_at(self, share: float) -> float:
        """Standard error of a share of all tokens, which one token draws to 1/2: it is never 0."""
        share = (share * self.tokens + 0.5) / (self.tokens + 1)
        return _TEXT * math.sqrt(share * (1 - share) / self.tokens)


def collect(cells: Iterable[tuple[Cell, Row]]) -> dict[str, Measured]:
    """All measurements by cache, up to the first window that has no numbers."""
    by_cache: dict[str, dict[int, Row]] = {}
    for cell, row in cells:
        rows = by_cache.setdefault(cell["cache"], {})
        if "tokens" in row:
            rows[cell["window"]] = row
    measured = {}
    for name, rows in by_cache.items():
        count = next(number for number in range(len(rows) + 1) if number not in rows)
        if count:
            measured[name] = Measured(name, tuple(rows[number] for number in range(count)))
    return measured


def complete(results: Results, names: Sequence[str], windows: int) -> list[Measured]:
    """Those of ``names`` that were measured on the first ``windows``."""
    measured = collect(results)
    some = [measured[name] for name in names if name in measured]
    return [Measured(one.name, one.rows[:windows]) for one in some if len(one.rows) >= windows]


def still_running(measured: Sequence[Measured], target: float) -> list[str]:
    """The names of those that may still be the choice, in the order given.

    Left out is what is far below the target, and what is dearer than one that is far above it. Of
    variants that are all far below, the best one goes on.
    """
    surplus = {one.name: one.surplus(target) for one in measured}
    possible = [one for one in measured if surplus[one.name] > -_FAR]
    sure = [one.cost for one in measured if surplus[one.name] > _FAR]
    names = [one.name for one in possible if not sure or one.cost <= min(sure)]
    return names or sorted(surplus, key=surplus.__getitem__)[-1:]


def standing(results: Results, names: Sequence[str]) -> tuple[int, list[str]]:
    """The first window that is not measured whole, and those of ``names`` that run in it."""
    running, windows = list(names), results.setup["windows"]
    for window in range(windows):
        if window:
            running = still_running(complete(results, running, window), results.setup["agreement"])
        cells = ({"cache": name, "window": window} for name in running)
        if any(results.find(cell) is None for cell in cells):
            return window, running
    return windows, running


def finalists(results: Results) -> list[Measured]:
    """The variants that a tuning has measured on all windows; none before its end."""
    first = [cell["cache"] for cell, _ in results if cell["window"] == 0]
    names, windows = [name for name in first if name != FULL], results.setup["windows"]
    window, running = standing(results, names)
    if len(names) < results.setup["variants"] or window < windows:
        return []
    return complete(results, running, windows)


def choose(measured: Sequence[Measured], target: float) -> tuple[Measured | None, str]:
    """The cheapest variant that reaches ``target``, and how sure that is; None of none.

    ``"sure"``: with a standard error to spare; ``"mean"``: the mean reaches it; ``"missed"``: none
    does, and this is the best there is.
    """
    by_cost = sorted(measured, key=lambda one: one.cost)
    for certainty, errors in (("sure", 1.0), ("mean", 0.0)):
        for one in by_cost:
            if one.agreement - errors * one.agreement_error >= target:
                return one, certainty
    return max(by_cost, key=lambda one: one.agreement, default=None), "missed"


def front(measured: Sequence[Measured]) -> list[Measured]:
    """The variants that agree more than every cheaper one, cheapest first."""
    best: list[Measured] = []
    for one in sorted(measured, key=lambda one: (one.cost, -one.agreement)):
        if not best or one.agreement > best[-1].agreement:
            best.append(one)
    return best


_HEADER = "cache", "tokens", "agreement, %", "KL", "MB a step", "of full", "device MB", "ms a step"


def configuration(results: Results, name: str) -> dict[str, Any]:
    """``cache_implementation`` and ``cache_config`` of a variant, as ``generate`` takes them.

    Of a stranger's cache they are its factory and what it is given.
    """
    row = next(row for cell, row in results if cell["cache"] == name)
    method = "factory" if ":" in row["method"] else "cache_implementation"
    return {method: row["method"], "cache_config": row["cache_config"]}


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
    budgets = re.compile(":(top_k|dense_below)=[^:]*")
    points = [
        (budgets.sub("", one.name), 100 * one.step_bytes / full, 100 * one.agreement)
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


def _variants(measured: Mapping[str, Measured]) -> list[Measured]:
    return [one for name, one in measured.items() if name != FULL]


def _line(one: Measured, full: Measured, is_choice: bool) -> list[str]:
    return [
        f"**{one.name}**" if is_choice else one.name,
        str(one.tokens),
        "100" if one is full else f"{100 * one.agreement:.2f} ± {100 * one.agreement_error:.2f}",
        "0" if one is full else or_dash(one.kl, ".1e"),
        f"{one.step_bytes / 1e6:.4g}",
        f"{one.step_bytes / full.step_bytes:.1%}",
        f"{one.device_bytes / 1e6:.4g}",
        f"{one.ms:.3g}",
    ]


def _remarks(results: Results, variants: Sequence[Measured], best: Sequence[Measured]) -> str:
    _, running = standing(results, [one.name for one in variants])
    late = [one for one in variants if len(one.rows) < results.setup["windows"]]
    stopped = sum(one.name not in running for one in late)
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
