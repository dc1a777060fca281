"""The variants that go on to the next window, that are on the front, and the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.results import Cell, Results

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
    def kl(self) -> float:
        """KL(full || variant), mean over tokens, in nats."""
        return sum(row["kl"] for row in self.rows) / self.tokens

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
