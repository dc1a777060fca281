"""The variants that go on to the next window, that are on the front, and the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.results import Cell, Results

FULL = "full"
"""The name of full attention among caches."""

# Steps whose times are nearer than this are as quick as each other.
_AS_QUICK = 1.05
# The spread of fewer windows is a guess.
_LEAST_WINDOWS = 4
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
        """Standard error of ``agreement``, the larger one of tokens and of windows."""
        return max(self._token_error(self.agreement), self._window_error("equal"))

    @property
    def kl(self) -> float:
        """KL(full || variant), mean over tokens, in nats."""
        return sum(row["kl"] for row in self.rows) / self.tokens

    @property
    def kl_error(self) -> float:
        """Standard error of ``kl``, the larger one of tokens and of windows; 0 for one token."""
        if self.tokens < 2:
            return 0.0
        squares = sum(row["kl_squares"] for row in self.rows)
        variance = (squares - self.tokens * self.kl**2) / (self.tokens - 1)
        token_error = math.sqrt(max(0.0, variance) / self.tokens)
        return max(token_error, self._window_error("kl"))

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
        error = self._token_error(target)
        if len(self.rows) < _LEAST_WINDOWS:
            return (self.agreement - target) / (_TEXT * error)
        return (self.agreement - target) / max(error, self._window_error("equal"))

    def on(self, windows: int) -> Measured:
        """The measurements on the first windows."""
        return Measured(self.name, self.rows[:windows])

    def _token_error(self, share: float) -> float:
        """Standard error of a share of all tokens, which one token draws to 1/2: it is never 0."""
        share = (share * self.tokens + 0.5) / (self.tokens + 1)
        return math.sqrt(share * (1 - share) / self.tokens)

    def _window_error(self, key: str) -> float:
        """Standard error of the mean over windows of ``key`` a token; 0 for too few windows.

        Tokens of a window have its text in common, and so their errors.
        """
        if len(self.rows) < _LEAST_WINDOWS:
            return 0.0
        return stdev(row[key] / row["tokens"] for row in self.rows) / math.sqrt(len(self.rows))


@dataclass(frozen=True)
class Choice:
    """The choice, and how sure it is.

    Attributes:
        variant: None where there is none.
        certainty: ``"sure"``: its agreement reaches the target with a standard error to spare;
            ``"mean"``: the mean reaches it; ``"missed"``: it is the best there is.
    """

    variant: Measured | None
    certainty: str


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
    """Those of ``names`` that were measured on the first ``windows``, up to there."""
    measured = collect(results)
    rows = [measured[name].on(windows) for name in names if name in measured]
    return [one for one in rows if len(one.rows) == windows]


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
    """The first window that is not measured whole, and those of ``names`` that run in it.

    Where all that run to the end miss the target, those follow that were left out as dearer.
    """
    running, windows = list(names), results.setup["windows"]
    target = results.setup["agreement"]
    for window in range(windows):
        if window:
            running = still_running(complete(results, running, window), target)
        if not _measured_on(results, running, window):
            return window, running
    if choose(complete(results, running, windows), target).certainty == "missed":
        rest = [one for one in collect(results).values() if one.name in set(names) - set(running)]
        running += [one.name for one in rest if one.surplus(target) > -_FAR]
        for window in range(windows):
            if not _measured_on(results, running, window):
                return window, running
    return windows, running


def _measured_on(results: Results, names: Sequence[str], window: int) -> bool:
    return all(results.find({"cache": name, "window": window}) is not None for name in names)


def finalists(results: Results) -> list[Measured] | None:
    """The variants that a tuning has measured on all windows; None before its end."""
    first = [cell["cache"] for cell, _ in results if cell["window"] == 0]
    names, windows = [name for name in first if name != FULL], results.setup["windows"]
    if len(names) < results.setup["variants"]:
        return None
    window, running = standing(results, names)
    return complete(results, running, windows) if window == windows else None


def choose(measured: Sequence[Measured], target: float) -> Choice:
    """The cheapest variant that reaches ``target``; see ``Choice``."""
    by_cost = sorted(measured, key=lambda one: one.cost)
    for certainty, errors in (("sure", 1.0), ("mean", 0.0)):
        reaching = [x for x in by_cost if x.agreement - errors * x.agreement_error >= target]
        # Among variants of one cost the best is chosen.
        unbeaten = [x for x in reaching if not any(beats(other, x) for other in reaching)]
        if reaching:
            # Each may beat the next one in a circle, where times and divergences are nearly alike.
            return Choice((unbeaten or reaching)[0], certainty)
    return Choice(max(by_cost, key=lambda one: one.agreement, default=None), "missed")


def front(measured: Sequence[Measured]) -> list[Measured]:
    """The variants that no other one beats, cheapest first; see ``beats``."""
    unbeaten = [one for one in measured if not any(beats(other, one) for other in measured)]
    return sorted(unbeaten, key=lambda one: one.cost)


def beats(one: Measured, other: Measured) -> bool:
    """Whether ``one`` is nowhere worse (agreement, bytes, time) and somewhere better.

    On the windows that both have seen. Times count where they differ by more than 5%, and KL where
    agreement and bytes are equal.
    """
    shared = min(len(one.rows), len(other.rows))
    a, b = one.on(shared), other.on(shared)
    if a.agreement < b.agreement or a.step_bytes > b.step_bytes or a.ms > _AS_QUICK * b.ms:
        return False
    if (a.agreement, a.step_bytes) == (b.agreement, b.step_bytes):
        return _AS_QUICK * a.ms < b.ms or (a.kl < b.kl and b.ms <= _AS_QUICK * a.ms)
    return True
