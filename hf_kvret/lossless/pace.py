"""How many tokens to draft: the number that promises most tokens a second, or the caller's."""

from __future__ import annotations

from typing import Protocol

# Tokens of a draft that are compared. With the step's token their queries fill whole vectors.
_COUNTS = (1, 3, 5, 7, 11, 15, 23, 31)
_FIRST = 7
# Each new round multiplies the weight of older ones by this.
_MEMORY = 0.8
# Before anything is known, as many drafts count as accepted, and as tried.
_PRIOR_ACCEPTED, _PRIOR_TRIED = 3.0, 4.0
# Tokens decoded without drafts before they are tried again.
_PAUSE = 32


class Pace(Protocol):
    """Says how many tokens the next round drafts."""

    def count(self, most: int) -> int:
        """From 0, which is an exact step, to ``most``."""

    def learn(self, drafted: int, accepted: int, draft_s: float, exact_s: float) -> None:
        """A round of so many drafts is over, ``exact_s`` of its seconds in the exact pass."""


class FastestPace:
    """The number of drafts that promises most tokens a second.

    With a share ``a`` of drafts accepted, k drafts give ``(1 - a^(k+1)) / (1 - a)`` tokens a round
    (Leviathan et al. 2023, equation 1). A round takes k steps and an exact pass, whose time grows
    linearly with its queries. Both are measured, and old rounds are forgotten.
    """

    def __init__(self) -> None:
        self._accepted, self._tried = _PRIOR_ACCEPTED, _PRIOR_TRIED
        self._step_s = 0.0
        self._passes = _Line()
        self._pause = 0

    def count(self, most: int) -> int:
        counts = [count for count in _COUNTS if count <= most]
        if not counts:
            return 0
        if not self._step_s:
            return min(_FIRST, counts[-1])
        best = max([0, *counts], key=self._rate)
        self._pause = 0 if best else self._pause + 1
        if self._pause < _PAUSE:
            return best
        self._pause = 0
        return min(_FIRST, counts[-1])

    def _rate(self, count: int) -> float:
        """Tokens a second with so many drafts."""
        share = min(self._accepted / self._tried, 0.999)
        tokens = (1 - share ** (count + 1)) / (1 - share)
        return tokens / (count * self._step_s + self._passes.at(count + 1))

    def learn(self, drafted: int, accepted: int, draft_s: float, exact_s: float) -> None:
        self._passes.add(drafted + 1, exact_s)
        if not drafted:
            return
        self._accepted = _MEMORY * self._accepted + accepted
        # Drafts behind the first wrong one say nothing.
        self._tried = _MEMORY * self._tried + min(accepted + 1, drafted)
        step_s = draft_s / drafted
        self._step_s = step_s if not self._step_s else (self._step_s + step_s) / 2


class GivenPace:
    """``num_assistant_tokens`` of a call or its model, at least 0, and transformers' schedule."""

    def __init__(self, count: float, schedule: str | None) -> None:
        # transformers' own schedule once counted in floats.
        if not isinstance(count, int | float) or count < 0 or not float(count).is_integer():
            raise ValueError(f"num_assistant_tokens={count!r} of call or model: give an int from 0")
        self._count, self._grows = int(count), schedule in ("heuristic", "heuristic_transient")

    def count(self, most: int) -> int:
        return min(self._count, most)

    def learn(self, drafted: int, accepted: int, draft_s: float, exact_s: float) -> None:
        if self._grows and drafted:
            self._count = self._count + 2 if accepted == drafted else max(1, self._count - 1)


class _Line:
    """Seconds as a straight line of the number of queries, by least squares."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in {"weight": 1.0, "x": x, "y": y, "xx": x * x, "xy": x * y}.items():
            setattr(self, f"_{name}", _MEMORY * getattr(self, f"_{name}") + value)

    def at(self, x: float) -> float:
        """Seconds at ``x``; the line never falls."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        return max(mean_y + max(slope, 0.0) * (x - mean_x), 1e-9)
