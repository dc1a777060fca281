"""Options of LRQK."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_kvret.options.config import (
    RetrievalConfig,
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_seed,
)
from hf_kvret_kernels import proxy

_RANK = 32
_CHOICES = {
    "factors": ("closed", "als"),
    "proxy_dtype": ("bfloat16", "int8"),
    "init": ("randn", "top", "topcol"),
}


@dataclass(frozen=True)
class LRQKConfig(RetrievalConfig):
    """LRQK's options beside those of every retrieval cache.

    Attributes:
        rank: numbers of a proxy, r, at most the head dim and 256. ``None``: 32, or the head dim if
            it is less.
        factors: ``"closed"``: the best factors there are, from Gram matrices. ``"als"``: the
            paper's algorithms 1 and 2, alternating least squares with an update at every step.
        shared: with ``"closed"``, one set of proxies for all query heads of a KV head. ``False``:
            one for each. ``"als"`` always has one for each.
        proxy_dtype: of the keys' proxies: ``"bfloat16"``, or ``"int8"`` with one step per column.
        center: with ``"closed"``, factors fit keys without their mean. The mean shifts all scores
            of a query alike.
        recency: with ``"closed"``, weight of the newest queries when factors are made, from 0 to
            below 1.
        half_life: tokens after which a query counts half as new.
        drift: with ``"closed"``, factors are made again when the error for the newest queries has
            grown by this factor, and new ones would lower it by as much. ``inf``: never.
        init: with ``"als"``, the start, ``"randn"``, ``"top"`` or ``"topcol"`` (B.6).
        iterations: with ``"als"``, the most rounds of both algorithms.
        tolerance: with ``"als"``, a head stops after a round that changes its factors, or proxies,
            by a mean square below this (appendix D). 0: it never stops early.
        penalty: with ``"als"``, all four lambdas of the paper.
        fit_recent: with ``"als"``, newest tokens that a step's query is fitted to, beside the
            selected ones (Omega, eq. 7). The paper fits to all of its lite tokens.
        seed: for ``init="randn"``.
    """

    learns_from_queries: ClassVar[bool] = True
    # Section 5.1, appendix D: r = 32, which is rank's own default; beside the selected tokens the
    # device has 64 "lite" ones, the newest, and nothing else.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "factors": "als",
            "top_k": 2048,
            "sink": 0,
            "recent": 64,
            "flush": 1,
            "dense_below": 0,
        }
    }

    top_k: int | float | None = None
    rank: int | None = None
    factors: str = "closed"
    shared: bool = True
    proxy_dtype: str = "bfloat16"
    center: bool = True
    recency: float = 0.5
    half_life: float = 16.0
    drift: float = 1.5
    init: str = "randn"
    iterations: int = 2
    tolerance: float = 1e-2
    penalty: float = 1.0
    fit_recent: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            check_int("rank", self.rank, 1)
        check_int("iterations", self.iterations, 1)
        check_int("fit_recent", self.fit_recent, 0)
        check_seed(self.seed)
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_flag("shared", self.shared)
        check_flag("center", self.center)
        check_number(
            "recency", self.recency, lambda x: 0.0 <= x < 1.0, "a weight from 0 to below 1"
        )
        check_number(
            "half_life", self.half_life, lambda x: 0.0 < x < math.inf, "a number of tokens above 0"
        )
        check_number(
            "drift",
            self.drift,
            lambda x: x >= 1.0,
            "a factor of at least 1; inf never projects anew",
        )
        check_number(
            "tolerance", self.tolerance, lambda x: 0.0 <= x < math.inf, "a mean square, 0 for none"
        )
        check_number("penalty", self.penalty, lambda x: 0.0 < x < math.inf, "a number above 0")

    def rank_of(self, dim: int) -> int:
        """The rank for heads of ``dim``; ValueError where there is no such rank."""
        if self.rank is None:
            return min(_RANK, dim)
        most = min(dim, proxy.MOST_RANK)
        if self.rank > most:
            raise ValueError(
                f"rank={self.rank} is above the head dim {dim}, or above {proxy.MOST_RANK}: a "
                f"proxy has at most as many numbers as a key; choose 1 to {most}, or None"
            )
        return self.rank

    def check_model(self, head_dim: int) -> None:
        """ValueError for a rank that heads of this dim do not have."""
        super().check_model(head_dim)
        self.rank_of(head_dim)
