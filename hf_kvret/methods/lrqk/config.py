"""Options of LRQK."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import OneOf, integer, option, real
from hf_kvret_kernels import proxy

_RANK = 32


@dataclass(frozen=True)
class LRQKConfig(RetrievalConfig):
    """LRQK's options beside those of every retrieval cache.

    Attributes:
        rank: numbers of a proxy, r, at most the head dim and 256. ``"auto"``: half of the head dim
            in int8, and at least 64; half of that in bf16, as the paper's 32 of 128. ``None``: 32.
            All: or the head dim if it is less.
        factors: ``"closed"``: the best factors there are, from Gram matrices. ``"als"``: the
            paper's algorithms 1 and 2, alternating least squares with an update at every step.
        proxy_dtype: of the keys' proxies: ``"int8"``, with one step per column, or ``"bfloat16"``.
            ``"auto"``: int8 with ``"closed"``, and bf16 with ``"als"``, which has no other.
        recency: with ``"closed"``, weight of the newest queries when factors are made, from 0 to
            below 1.
        half_life: tokens after which a query counts half as new.
        drift: with ``"closed"``, factors are made again when the error for the newest queries has
            grown by this factor, and new ones would lower it by as much.
        iterations: with ``"als"``, rounds of both algorithms.
        penalty: with ``"als"``, all four lambdas of the paper.
        fit_recent: with ``"als"``, newest tokens that a step's query is fitted to, beside the
            selected ones (Omega, eq. 7). The paper fits to all of its lite tokens.
        seed: with ``"als"``, of the random start.
    """

    learns_from_queries: ClassVar[bool] = True
    # Section 5.1, appendix D: beside the selected tokens the device has 64 "lite" ones, the newest,
    # and nothing else.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "rank": None,
            "factors": "als",
            "top_k": 2048,
            "sink": 0,
            "recent": 64,
            "flush": 1,
            "dense_below": 0,
            "rest": None,
        }
    }

    top_k: int | float | None = None
    rank: int | Literal["auto"] | None = option("auto", integer(1), OneOf("auto", None))
    factors: str = option("closed", OneOf("closed", "als"))
    proxy_dtype: str = option("auto", OneOf("auto", "int8", "bfloat16"))
    recency: float = option(0.5, real(note="a weight", least=0, below=1))
    half_life: float = option(16.0, real(note="tokens", above=0, below=math.inf))
    drift: float = option(1.5, real(note="inf: for no error", least=1))
    iterations: int = option(2, integer(1))
    penalty: float = option(1.0, real(above=0, below=math.inf))
    fit_recent: int = option(64, integer(0))
    seed: int = option(0, integer(0, below=2**63))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factors == "als" and self.proxy_dtype == "int8":
            raise ValueError("proxies of factors='als' are bf16: drop proxy_dtype='int8'")

    @property
    def in_bytes(self) -> bool:
        """Whether a number of a proxy is a byte."""
        return self.factors == "closed" and self.proxy_dtype != "bfloat16"

    def rank_of(self, dim: int) -> int:
        """The rank for heads of ``dim``; ValueError where there is no such rank."""
        most = min(dim, proxy.MOST_RANK)
        if self.rank is None:
            return min(most, _RANK)
        if self.rank == "auto":
            return min(most, max(_RANK, dim // 4) * (2 if self.in_bytes else 1))
        if self.rank > most:
            raise ValueError(
                f"rank={self.rank} is above the head dim {dim}, or above {proxy.MOST_RANK}: a "
                f"proxy has at most as many numbers as a key; choose 1 to {most}, or auto"
            )
        return self.rank

    def check_head_dim(self, head_dim: int) -> None:
        """ValueError for a rank that heads of this dim do not have."""
        super().check_head_dim(head_dim)
        self.rank_of(head_dim)
