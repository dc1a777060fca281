"""For models with an indexer of their own: it selects, the store attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from transformers import PreTrainedConfig

from hf_kvret.cache import RetrievalCache
from hf_kvret.models.compatibility import index_budget
from hf_kvret.options.config import RetrievalConfig

_MEANINGLESS = ("rest", "track_recall", "prompt", "lossless", "select_every")


@dataclass(frozen=True)
class NativeConfig(RetrievalConfig):
    """Options of window, passes and store; the model says which tokens, and how many.

    Attributes:
        top_k: the most tokens that the model's indexer names, ``index_topk`` of its config. It may
            be left out, and another number is refused.

    Raises:
        ValueError: an option of a selection that is the model's own.
    """

    follows_model: ClassVar[bool] = True

    top_k: int | float | None = None
    rest: Literal["mean"] | None = None

    def exact(self) -> Self:
        """These options: the model's budget is part of what is exact."""
        return self.replace(slots=1.0)

    @classmethod
    def why_not(cls, name: str, value: Any) -> list[str]:
        """No codes: a prompt's own rows are read where they are stored. No own selection."""
        if name == "store" and value.startswith("higgs"):
            return [
                "native keeps rows as they are, also those of a prompt that is being read; take "
                "'device', 'host', 'resident', 'cpu' or 'disk'"
            ]
        if name in _MEANINGLESS and value != getattr(cls, name):
            return [
                "it has no meaning, as native attends to what the model's own indexer chooses; "
                "leave it out"
            ]
        return []

    @classmethod
    def takes(cls, name: str, value: Any) -> bool:
        """A budget is the model's own, which a default for all methods rarely is."""
        return (name != "top_k" or value is None) and super().takes(name, value)


class NativeKVCache(RetrievalCache):
    """Attends to the tokens that the model's own indexer names (DeepSeek-V3.2, GLM-5).

    The result is that of transformers, which computes attention to all tokens and masks the others.
    Here cold rows that are not named are not read, and need not be on the device. Rows of the
    window are read and masked; the indexer's keys stay on the device.

    Raises:
        ValueError: a model without an indexer, or another ``top_k`` than its own.
    """

    name: ClassVar[str] = "native"
    Config: ClassVar[type[RetrievalConfig]] = NativeConfig
    IndexClass: ClassVar[type[Any] | None] = None  # The model has it.

    @classmethod
    def options_for(cls, options: Any, config: PreTrainedConfig) -> Any:
        options = super().options_for(options, config)
        budget = index_budget(config)
        if options.top_k not in (None, budget):
            raise ValueError(
                f"top_k={options.top_k}: the indexer of {config.model_type} names {budget} tokens "
                "(index_topk in its config); leave top_k out"
            )
        return options.replace(top_k=budget)
