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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observed is None:
            return
        if isinstance(self.observed, bool) or not isinstance(self.observed, int):
            raise TypeError(
                f"observed must be an int (queries) or None (all), got {self.observed!r}"
            )
        if self.observed < 1:
            raise ValueError(
                f"observed={self.observed}: at least 1 query has to say what is attended; None for "
                "all"
            )

    @property
    def group_obstacle(self) -> str:
        """See ``RetrievalConfig``."""
        return "h2o keeps one set of tokens for all query heads of a KV head"

    @property
    def estimate_obstacle(self) -> str:
        """See ``RetrievalConfig``."""
        return "h2o has dropped what it would have to estimate"

    @classmethod
    def for_prompt(cls, prompt_len: int, share: float = 0.2, **changes: Any) -> Self:
        """The published protocol: ``share`` of a prompt, half heavy hitters and half recent tokens.

        Both counts stay while text is generated, a token is evicted at every step, nothing else is
        protected. Each half is at least one token.

        Args:
            prompt_len: tokens of the prompt.
            share: above 0 and at most 1.
            **changes: other options.

        Raises:
            ValueError: a share out of range, or a prompt without tokens.
        """
        if isinstance(prompt_len, bool) or not isinstance(prompt_len, int):
            raise TypeError(f"prompt_len must be an int (tokens), got {prompt_len!r}")
        if prompt_len < 1:
            raise ValueError(f"prompt_len={prompt_len} must be at least 1")
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"share must be a number, got {share!r}")
        if not 0.0 < share <= 1.0:
            raise ValueError(
                f"share={share}: the part of the prompt that is kept, above 0 and at most 1"
            )
        half = max(1, int(share / 2 * prompt_len))
        paper_options = {
            "top_k": half,
            "recent": half,
            "sink": 0,
            "flush": 1,
            "dense_below": 0,
        }
        return cls.from_options(**{**paper_options, **changes})
