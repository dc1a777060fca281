"""lm-evaluation-harness' Hugging Face model, made to insist on a cache of ours.

Importing registers it with lm-eval as the model ``hf-kvret``. Needs lm-eval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hf_kvret.models.versions import as_argument
from hf_kvret.registry import registered_methods

NAME = "hf-kvret"


@dataclass(frozen=True)
class Generation:
    """One batch that was generated.

    Attributes:
        cache: its name.
        rows_read, rows_cold: by selections, summed over layers, heads and queries; 0 where the
            cache was too short to retrieve.
    """

    cache: str
    rows_read: int
    rows_cold: int


_generations: list[Generation] = []


def generations() -> list[Generation]:
    """The batches of this process so far, in order."""
    return list(_generations)


@register_model(NAME)
class RetrievalLM(HFLM):
    """``HFLM`` that generates through a retrieval cache, or not at all.

    lm-eval's own ``hf`` takes ``gen_kwargs={"cache_implementation": "paris"}`` too, but it scores
    log-likelihoods in one forward pass without a cache and says nothing.

    Raises:
        ValueError: where log-likelihoods are asked for, or a generation without one of our caches.
    """

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        methods = registered_methods()
        name = generation_kwargs.get("cache_implementation")
        if name not in methods:
            raise ValueError(
                f"cache_implementation={name!r}: name one of {', '.join(methods)} in gen_kwargs, "
                "or use lm-eval's own model hf"
            )
        # The same cache that `generate` would make of the name; made here, it can be asked.
        options = generation_kwargs.get("cache_config") or {}
        cache = methods[name](self.model.config, **options)
        tokens = super()._model_generate(
            context, max_length, stop, **as_argument(cache), **generation_kwargs
        )
        layers = cache.stats()["layers"]
        read, cold = (sum(layer[key] for layer in layers) for key in ("selected", "cold_rows"))
        _generations.append(Generation(name, read, cold))
        return tokens

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refused: see the class."""
        _refuse(requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refused: see the class."""
        _refuse(requests)


def _refuse(requests: list[Any]) -> NoReturn:
    tasks = sorted({request.task_name for request in requests if request.task_name})
    raise ValueError(
        f"{', '.join(tasks) or 'a task'}: asks for log-likelihoods, which lm-eval computes in one "
        "forward pass without a cache, so no cache can make a difference: leave it out of --tasks, "
        "or run lm_eval itself. Tasks of output type generate_until use the cache"
    )
