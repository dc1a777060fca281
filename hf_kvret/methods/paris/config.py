"""Options of ParisKV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels import paris

_TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)
# For so many subspaces that the points of six tiers don't fit a byte: they find as much.
_FEW_TIERS = (0.15, 0.50, 1.0)
_MOST_POINTS = 254
_PAPER_LEVELS = (0.0420, 0.1266, 0.2129, 0.3023, 0.3968, 0.4990, 0.6148, 0.7604)
_PAPER_SCHEDULE = (
    (5_000, 0.50, 0.50),
    (10_000, 0.25, 0.30),
    (30_000, 0.20, 0.25),
    (math.inf, 0.10, 0.20),
)


@dataclass(frozen=True)
class ParisConfig(RetrievalConfig):
    """ParisKV's options beside those of every retrieval cache.

    Attributes:
        subspace_dim: coordinates of a subspace, m (4 or 8).
        tiers: shares of ``rho`` at which a centroid's points drop by one (section 4.2). None takes
            the paper's six up to 42 subspaces, and three of them above.
        schedule: ``(length, beta, rho)`` triples: below that many cold tokens, the share of
            candidates and the share of keys that a subspace gives points to. The last
            triple serves all greater lengths.
        group_reduce: how the query heads of a KV head share a selection: ``"max"`` of their
            softmax weights, or ``"mean"`` of the queries (the published code).
        center: subtract the mean key of the prompt before encoding; ranking is unchanged by it.
        levels: the eight magnitude levels; None computes the Lloyd-Max ones for ``subspace_dim``.
        seed: of the random signs, the same for all layers and heads.
    """

    subspace_dim: int = 8
    tiers: tuple[float, ...] | None = None
    schedule: tuple[tuple[float, float, float], ...] = (
        *_PAPER_SCHEDULE[:-1],
        (512 << 10, 0.10, 0.20),
        (math.inf, 0.07, 0.20),
    )
    group_reduce: str = "max"
    center: bool = True
    levels: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tiers", "schedule", "levels"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) and (name == "schedule" or value is not None):
                raise TypeError(f"{name} must be a sequence, got {value!r}")
        if not isinstance(self.center, bool):
            raise TypeError(f"center must be True or False, got {self.center!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}")
        if isinstance(self.subspace_dim, bool) or not isinstance(self.subspace_dim, int):
            raise TypeError(f"subspace_dim must be an int, got {self.subspace_dim!r}")
        # JSON has no tuples: lists come back from a saved configuration.
        object.__setattr__(self, "schedule", tuple(tuple(row) for row in self.schedule))
        for name in ("tiers", "levels"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.subspace_dim not in (4, 8):
            raise ValueError(f"subspace_dim={self.subspace_dim}: choose 4 or 8")
        if self.group_reduce not in ("max", "mean"):
            raise ValueError(f"group_reduce={self.group_reduce!r}: choose 'max' or 'mean'")
        if self.levels is not None and len(self.levels) != 8:
            raise ValueError(f"levels needs 8 magnitudes, got {len(self.levels)}")
        tiers = _TIERS if self.tiers is None else self.tiers
        numbers = (*tiers, *(self.levels or ()))
        if not all(isinstance(number, int | float) for number in numbers):
            raise TypeError(f"tiers={self.tiers} and levels={self.levels} must be numbers")
        if not 1 <= len(tiers) <= 15 or not all(0 < tier <= 1 for tier in tiers):
            raise ValueError(f"tiers={self.tiers}: 1 to 15 shares above 0 and at most 1")
        if not self.schedule:
            raise ValueError("schedule is empty: give at least one (length, beta, rho) row")
        for row in self.schedule:
            if len(row) == 3 and not all(isinstance(number, int | float) for number in row):
                raise TypeError(f"schedule row {row}: three numbers (length, beta, rho)")
            if len(row) != 3 or not (0 < row[1] <= 1 and 0 < row[2] <= 1):
                raise ValueError(
                    f"schedule row {row}: (length, beta, rho) with beta and rho above 0 and at "
                    "most 1"
                )

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The published algorithm: k = 100, the group's mean query, its levels and schedule."""
        options = {
            "top_k": 100,
            "group_reduce": "mean",
            "center": False,
            "levels": _PAPER_LEVELS,
            "schedule": _PAPER_SCHEDULE,
            **changes,
        }
        return cls.from_options(**options)

    def check_model(self, head_dim: int) -> None:
        """ValueError for rows of this dim that have no codes, or whose points a byte can't hold."""
        super().check_model(head_dim)
        self.check_dim(head_dim)

    def check_dim(self, head_dim: int) -> None:
        """The part of ``check_model`` that is ParisKV's own."""
        if head_dim > paris.MAX_HEAD_DIM:
            raise ValueError(
                f"head dim {head_dim}: paris codes exist up to {paris.MAX_HEAD_DIM}; use "
                "cache_implementation='flat'"
            )
        self.tiers_for(paris.rotated_dim(head_dim) // self.subspace_dim)

    def tiers_for(self, subspaces: int) -> tuple[float, ...]:
        """Tiers for keys of so many subspaces; ValueError where a byte can't hold their points."""
        tiers = self.tiers
        if tiers is None:
            tiers = _TIERS if len(_TIERS) * subspaces <= _MOST_POINTS else _FEW_TIERS
        if len(tiers) * subspaces > _MOST_POINTS:
            fit = _MOST_POINTS // subspaces
            ways = ["subspace_dim=8"] if self.subspace_dim < 8 else []
            ways.append(f"at most {_tiers(fit)}" if fit else "cache_implementation='flat'")
            raise ValueError(
                f"scores of {_tiers(len(tiers))} in {subspaces} subspaces of {self.subspace_dim} "
                f"numbers go above {_MOST_POINTS}, which a byte can't hold: use {' or '.join(ways)}"
            )
        return tiers

    def with_candidates(self, beta: float) -> Self:
        """The same with that share of candidates at every length, above 0 and at most 1.

        At least as many keys earn points in a subspace (section 4.2.2: rho >= beta).
        """
        rows = ((length, beta, max(rho, beta)) for length, _, rho in self.schedule)
        return self.replace(schedule=tuple(rows))

    def ratios(self, cold_len: int) -> tuple[float, float]:
        """``(beta, rho)`` for that many cold tokens."""
        for length, beta, rho in self.schedule:
            if cold_len < length:
                return beta, rho
        return self.schedule[-1][1:]


def _tiers(count: int) -> str:
    return f"{count} tier" if count == 1 else f"{count} tiers"
