"""Options of H2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from hf_kvret.options.config import RetrievalConfig


@dataclass(frozen=True)
class H2OConfig(RetrievalConfig):
    """H2O's options beside those of every retrieval cache.

    ``top_k`` is how many heavy hitters a KV head keeps, by default a fifth of the cold tokens.
    ``recent`` and ``sink`` come on top of it.

    Attributes:
        observed: of the queries that came since the last selection, as all of a prompt, only so
            many of the newest count; None: all of them. They are kept until the selection, so a
            number bounds their memory and the work on a long prompt.
    """

    top_k: int | float | None = 0.2
    observed: int | None = None
    group_obstacle = "h2o keeps one set of tokens for all query heads of a KV head"
    estimate_obstacle = "h2o has dropped what it would have to estimate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observed is not None:
            _check_count("observed", self.observed, "queries, or None for all")

    @classmethod
    def for_prompt(cls, prompt_len: int, share: float = 0.2, **changes: Any) -> Self:
        """The published protocol: ``share`` of a prompt, half heavy hitters and half recent tokens.

        Both counts stay while text is generated, a token is evicted at every step, nothing else is
        protected. Each half is at least one token; ``changes`` are other options. ValueError for a
        ``share`` that is not above 0 and at most 1, or for a prompt without tokens.
        """
        _check_count("prompt_len", prompt_len, "tokens")
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"share must be a number, got {share!r}")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: the part that is kept, above 0 and at most 1")
        half = max(1, int(share / 2 * prompt_len))
        published = {"top_k": half, "recent": half, "sink": 0, "flush": 1, "dense_below": 0}
        return cls.from_options(**{**published, **changes})


def _check_count(name: str, count: object, unit: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{name} must be an int ({unit}), got {count!r}")
    if count < 1:
        raise ValueError(f"{name}={count}: at least 1 is needed ({unit})")
