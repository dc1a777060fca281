"""The variants that go on to the next round, that are on the front, and the choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.results import Cell, Results

FULL = "full"
"""The name of full attention among caches."""

LEAST = 4
"""So many variants are never halved."""
# Steps whose times are nearer than this are as quick as each other.
_AS_QUICK = 1.05
# The spread of fewer windows is a guess.
_LEAST_WINDOWS = 4
# Standard errors below the target, where further windows would be in vain.
_HOPELESS = -4.0
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


def rounds(windows: int) -> list[range]:
    """The windows of each round: the first one, the second, two more, four more and so on."""
    ranges, start = [], 0
    while start < windows:
        stop = min(windows, max(1, 2 * start))
        ranges.append(range(start, stop))
        start = stop
    return ranges


def halved(count: int) -> int:
    """How many of ``count`` variants go on."""
    return max(min(count, LEAST), -(-count // 2))


def survivors(measured: Sequence[Measured], target: float) -> list[str]:
    """The half that is most likely to hold the choice, in the order given.

    A variant is the choice if it reaches the target and nothing cheaper does; the chances of all
    are taken as independent. The one that is surest to reach the target is always among them.
    """
    by_cost = sorted(measured, key=lambda one: one.cost)
    # Among equally sure variants it is the cheapest.
    surest = max(by_cost, key=lambda one: one.surplus(target), default=None)
    ranked, none_cheaper = [], 1.0
    for rank, one in enumerate(by_cost):
        surplus = one.surplus(target)
        chance = NormalDist().cdf(surplus)
        # Far below the target all chances are 0, and the surplus decides.
        ranked.append((one is not surest, -none_cheaper * chance, -surplus, rank, one.name))
        none_cheaper *= 1 - chance
    names = {name for *_, name in sorted(ranked)[: halved(len(ranked))]}
    return [one.name for one in measured if one.name in names]


def complete(results: Results, running: Sequence[str], stop: int) -> list[Measured]:
    """Those of ``running`` that were measured on all windows before ``stop``, up to there."""
    measured = collect(results)
    rows = [measured[name].on(stop) for name in running if name in measured]
    return [one for one in rows if len(one.rows) == stop]


def finalists(results: Results) -> list[Measured] | None:
    """The variants that a tuning has measured on all windows; None before its end."""
    return None if _last_round(results) is None or dropped(results) else _whole(results)


def _last_round(results: Results) -> list[Measured] | None:
    """What halving left, measured on all windows; None before that."""
    running = [cell["cache"] for cell, _ in results if cell["window"] == 0]
    # The first window is measured with all variants and full attention.
    if len(running) <= results.setup["variants"]:
        return None
    running.remove(FULL)
    last: list[Measured] = []
    for windows in rounds(results.setup["windows"]):
        cells = [{"cache": name, "window": window} for name in running for window in windows]
        if any(results.find(cell) is None for cell in cells):
            return None
        last = complete(results, running, windows.stop)
        running = survivors(last, results.setup["agreement"])
    return last


def dropped(results: Results) -> list[Measured]:
    """Variants to measure to the end, as all that halving left miss the target.

    Those that halving left out and that may reach it, the likeliest first. None where one of those
    that were measured to the end reaches it.
    """
    target = results.setup["agreement"]
    if not _last_round(results) or choose(_whole(results), target).certainty != "missed":
        return []
    rest = [
        one
        for one in collect(results).values()
        if results.find({"cache": one.name, "window": len(one.rows)}) is None
        and len(one.rows) < results.setup["windows"]
        and one.surplus(target) > _HOPELESS
    ]
    return sorted(rest, key=lambda one: one.surplus(target), reverse=True)


def _whole(results: Results) -> list[Measured]:
    """The variants that were measured on all windows."""
    names = [name for name in collect(results) if name != FULL]
    return complete(results, names, results.setup["windows"])


def choose(measured: Sequence[Measured], target: float) -> Choice:
    """The cheapest variant of the last round that reaches ``target``; see ``Choice``."""
    by_cost = sorted(measured, key=lambda one: one.cost)
    for certainty, errors in (("sure", 1.0), ("mean", 0.0)):
        reaching = [x for x in by_cost if x.agreement - errors * x.agreement_error >= target]
        # Among variants of one cost the best is chosen.
        unbeaten = [x for x in reaching if not any(beats(other, x) for other in reaching)]
        if unbeaten:
            return Choice(unbeaten[0], certainty)
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
