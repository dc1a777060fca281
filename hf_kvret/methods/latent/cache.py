"""LatentKVCache: absorbed attention over all latents."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.latent.config import LatentConfig
from hf_kvret.models.compatibility import is_latent
from hf_kvret.options.config import RetrievalConfig


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

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> Any:
        if not is_latent(config):
            raise ValueError(
                f"{config.model_type} has no latent attention, so nothing can be absorbed: leave "
                "cache_implementation out, or choose a method that retrieves, as 'paris'"
            )
        return super().options_for(options, config)

    @classmethod
    def make_index(cls, options: Any, layer: int) -> None:
        """None: nothing is selected."""
