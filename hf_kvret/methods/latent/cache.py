"""Absorbed attention over all latents: nothing is selected."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from transformers import PreTrainedConfig

from hf_kvret.cache import RetrievalCache
from hf_kvret.models.compatibility import is_latent
from hf_kvret.options.config import RetrievalConfig

_MEANINGFUL = {
    *("prefill_chunk", "max_draft", "graph", "compile"),
    *("snapshots", "snapshot_every", "on_divergence"),
}


@dataclass(frozen=True)
class LatentConfig(RetrievalConfig):
    """Nothing is selected and nothing goes cold: of the options only those of passes matter.

    ``prefill_chunk``, ``max_draft``, ``graph``, ``compile``, ``snapshots``, ``snapshot_every`` and
    ``on_divergence`` are as for every cache. Sizes of window and sinks, budget and store have no
    meaning, since all tokens stay in the window.

    Raises:
        ValueError: an option without a meaning that is not its default.
    """

    retrieves: ClassVar[bool] = False

    rest: Literal["mean"] | None = None

    @classmethod
    def why_not(cls, name: str, value: Any) -> list[str]:
        """Only options of passes, and defaults."""
        if name in _MEANINGFUL or value == getattr(cls, name):
            return []
        return [
            "it has no meaning, as latent keeps all tokens on the model's device and attends to "
            "all of them; leave it out, or take a method that retrieves, as "
            "cache_implementation='flat'"
        ]

    @property
    def dense_len(self) -> int:
        """Longer than any cache."""
        return sys.maxsize

    @property
    def even_len(self) -> int:
        """See ``RetrievalConfig``; nothing ever goes cold."""
        return 8192

    def exact(self) -> Self:
        """These options: they are exact."""
        return self


class LatentKVCache(RetrievalCache):
    """All tokens, attended to as they are kept: one row ``latent | rotated key`` for all heads.

    transformers expands the latents of the whole context into keys and values of every head, in
    every layer and at every token. Here the query is absorbed instead, ``W_UK^T q``, and the result
    is taken out through ``W_UV`` (DeepSeek-V2, section 2.1): the same attention, up to rounding.
    Nothing is retrieved; rows stay on the model's device.

    Raises:
        ValueError: a model without latent attention.
    """

    name: ClassVar[str] = "latent"
    Config: ClassVar[type[RetrievalConfig]] = LatentConfig
    IndexClass: ClassVar[type[Any] | None] = None

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> Any:
        if not is_latent(config):
            raise ValueError(
                f"{config.model_type} has no latent attention, so nothing can be absorbed: leave "
                "cache_implementation out, or choose a method that retrieves, as 'paris'"
            )
        return super().options_for(options, config)
