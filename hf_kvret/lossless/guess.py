"""Which token the caller's loop will choose, guessed from the logits of a draft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

# Settings of ``generate`` whose processors run the model, or read an encoder's input.
_NOT_FOR_DRAFTS = ("guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size")

Guess = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of the ids so far ``[1, n]`` and logits ``[1, V]``: the token ``[1, 1]``, and the scores."""


def greedy(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest logit."""
    return logits.argmax(dim=-1, keepdim=True), logits


def guess_of(model: PreTrainedModel, generation_config: Any, prompt_len: int) -> Guess:
    """The guess for a call of ``generate`` with its own copy of ``generation_config``.

    It scores logits as the settings of ``generate`` say, and samples where these do: with the
    random numbers that the loop itself will use, so nearly equal scores give the same token. The
    caller's own processors are not called, as they may count their calls.
    """
    config = copy.copy(generation_config)
    for name in _NOT_FOR_DRAFTS:
        setattr(config, name, None)
    # Its own instances: those of the loop may keep something of each call.
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=max(1, prompt_len), device=model.device
    )

    def guess(ids: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = processors(ids, logits.float())
        if not config.do_sample:
            return greedy(ids, scores)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1), scores

    return guess
