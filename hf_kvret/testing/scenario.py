"""The parts of a mode of use: prompts, generate and forward calls, and the record of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_kvret.models.versions import as_argument
from hf_kvret.testing.models import PAD_TOKEN, VOCAB_SIZE

CacheMaker = Callable[[], Cache]

FIRST_WORD = 8
"""Smallest token id in prompts; those below mark padding, text and images."""

NEW_TOKENS = 8
"""Tokens that each `generate` of a mode adds."""


FAILURES = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a cache or a model that can't do what a mode asks for."""


@dataclass
class Outcome:
    """The result of one run of a mode.

    Attributes:
        values: named tensors to compare, in the order in which they arose: integers exactly,
            floats with a tolerance.
        caches: every cache that took part, forks included.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)


class Scenario:
    """One run of one mode on one model: makes caches, calls the model, writes the outcome.

    Args:
        model: the model, on any device; its weights stay as they are, its settings for drafts may
            change.
        make_cache: returns a new, empty cache; None for the reference, a ``DynamicCache``.
    """

    def __init__(self, model: PreTrainedModel, make_cache: CacheMaker | None) -> None:
        self.model: Any = model  # generate comes from a mixin that type checkers don't see
        self.outcome = Outcome()
        self.device: torch.device = self.model.device
        self._is_reference = make_cache is None
        self._make_cache = make_cache or (lambda: dynamic_cache(model))
        for module in model.modules():
            # Qwen2-VL keeps the last batch's position offsets, which fit no other batch.
            if hasattr(module, "rope_deltas"):
                module.__dict__["rope_deltas"] = None

    def prompt(self, batch: int, length: int, salt: int = 0) -> torch.Tensor:
        """As the function `prompt`, on the model's device."""
        return prompt(batch, length, salt).to(self.device)

    def ragged(self, lengths: tuple[int, ...], salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """As the function `ragged`, on the model's device."""
        ids, mask = ragged(lengths, salt)
        return ids.to(self.device), mask.to(self.device)

    def cache(self) -> Cache:
        """A new, empty cache, registered in the outcome."""
        return self.register(self._make_cache())

    def register(self, cache: Cache) -> Cache:
        """`cache`, registered in the outcome: for copies that the mode makes itself."""
        self.outcome.caches.append(cache)
        return cache

    def reset(self, cache: Cache) -> Cache:
        """`cache`, reset; for the reference a new one, which is what a reset promises."""
        if self._is_reference:
            return self.cache()
        cache.reset()
        return cache

    def record(self, label: str, value: torch.Tensor) -> None:
        """Write `value` to the outcome, detached from what may change it later.

        Raises:
            ValueError: `label` was recorded before.
        """
        if label in self.outcome.values:
            raise ValueError(f"{label!r} is recorded twice: give every value a label of its own")
        self.outcome.values[label] = value.detach().clone()

    def generate(
        self, ids: torch.Tensor | None, cache: Cache, label: str = "generate", **options: Any
    ) -> torch.Tensor:
        """Call ``generate``; return token ids ``[B, T]``, recorded with the logits of each step.

        With beams, whose order among equals is nobody's promise, the scores of the finished
        sequences are recorded in place of the logits.
        """
        beams = options.get("num_beams", 1) > 1
        options.setdefault("max_new_tokens", NEW_TOKENS)
        options.setdefault("do_sample", False)
        result = self.model.generate(
            ids,
            **as_argument(cache),
            return_dict_in_generate=True,
            output_logits=not beams,
            output_scores=beams,
            **options,
        )
        self.record(f"{label}: tokens", result.sequences)
        if beams:
            self.record(f"{label}: sequence scores", result.sequences_scores)
        else:
            self.record(f"{label}: logits", torch.stack(result.logits, dim=1))
        return result.sequences

    @torch.no_grad()
    def forward(
        self,
        ids: torch.Tensor,
        cache: Cache,
        label: str | None,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        keep: int | None = None,
    ) -> None:
        """Call the model itself on `ids` ``[B, n]`` that follow what `cache` holds.

        Records the logits of the last `keep` tokens (None: all); with label None, nothing.
        `mask` is ``[B, T + n]``; positions ``[B, n]`` are taken from it or counted when None.
        """
        end = cache.get_seq_length() + ids.shape[1]
        if positions is None:
            whole = ids.new_ones(ids.shape[0], end) if mask is None else mask[:, :end]
            positions = (whole.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        result = self.model(
            ids,
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=positions,
            **as_argument(cache),
            use_cache=True,
        )
        if label is not None:
            keep = ids.shape[1] if keep is None else keep
            self.record(f"{label}: logits", result.logits[:, -keep:])

    def feed(
        self, ids: torch.Tensor, cache: Cache, label: str, mask: torch.Tensor | None = None
    ) -> None:
        """Decode the given tokens `ids` ``[B, n]`` one at a time, recording every step's logits."""
        for step in range(ids.shape[1]):
            self.forward(ids[:, step : step + 1], cache, f"{label} {step}", mask)


def attempt(
    play: Callable[[Scenario], None], model: PreTrainedModel, make_cache: CacheMaker | None
) -> Outcome | str:
    """The outcome of `play`, or how it fails, as one line."""
    scenario = Scenario(model, make_cache)
    try:
        play(scenario)
    except FAILURES as error:
        return describe(error)
    return scenario.outcome


def describe(error: Exception) -> str:
    """`error` in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that ``generate`` itself would make for `model`."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def prompt(batch: int, length: int, salt: int = 0) -> torch.Tensor:
    """Random token ids ``[batch, length]``, the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(FIRST_WORD, VOCAB_SIZE, (batch, length), generator=generator)


def ragged(lengths: tuple[int, ...], salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of `lengths`: ids and mask, ``[B, max(lengths)]`` int64."""
    ids = prompt(len(lengths), max(lengths), salt)
    mask = torch.ones_like(ids)
    for sequence, length in enumerate(lengths):
        mask[sequence, : max(lengths) - length] = 0
    return ids.masked_fill(mask == 0, PAD_TOKEN), mask


def recurrent_layers(model: PreTrainedModel) -> bool:
    """Whether some layer keeps a state in place of rows: linear attention or a convolution."""
    layers = dynamic_cache(model).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
