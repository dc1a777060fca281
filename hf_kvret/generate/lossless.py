"""Lossless steps for a call of ``generate``, by its settings."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.requests import Request, set_in
from hf_kvret.lossless.pace import FastestPace, GivenPace, Pace
from hf_kvret.lossless.steps import Guess, LosslessSteps, greedy, why_not
from hf_kvret.models.ranks import is_split
from hf_kvret.replay import DecodeGraph

# Ranks can't agree on times that each of them measured.
_COUNT_OF_RANKS = 8
# Settings of ``generate`` whose processors run the model, or read an encoder's input.
_NOT_FOR_DRAFTS = ("guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size")


def lossless_obstacle(call: Request, cache: RetrievalCache, generation_config: Any) -> str:
    """Says why a ``call`` can't give full attention's answers any faster; empty if it can."""
    if not cache.options.lossless:
        return ""
    prompt = call.token_prompt()
    rows = (1 if prompt is None else len(prompt)) * (generation_config.num_return_sequences or 1)
    why = why_not(call.model, cache)
    if (generation_config.num_beams or 1) > 1:
        why = "beams change their sequences at each step, so nothing can be read ahead"
    elif rows > 1:
        why = f"{rows} sequences would accept different numbers of drafts"
    if why is None:
        return ""
    return (
        f"lossless=True: {why}; leave it out, call generate for one sequence at a time, or use "
        "cache_implementation='dynamic'"
    )


def steps_of(call: Request, cache: RetrievalCache, generation_config: Any) -> LosslessSteps | None:
    """What ``call`` decodes with; None where others draft, whose tokens an exact pass verifies."""
    mode = generation_config.get_generation_mode(call.arguments.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return None
    if call.steps is None:
        model, step = call.model, None
        if not generation_config.disable_compile and generation_config.compile_config is None:
            step = DecodeGraph(model, cache)
        confidence = _own(call, generation_config, "assistant_confidence_threshold")
        call.steps = LosslessSteps(
            model,
            cache,
            guess=_guess(model, generation_config, call.text_len),
            pace=_pace(call, generation_config),
            confidence=confidence or 0.0,
            # The last token that is chosen is never read.
            limit=lambda: generation_config.max_length - call.text_len - 1,
            step=step if step is not None and not step.reason else None,
        )
    return call.steps


def _guess(model: PreTrainedModel, generation_config: Any, prompt_len: int) -> Guess:
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


def _own(call: Request, generation_config: Any, name: str) -> Any:
    """A setting of the caller or of the model; None for transformers' own default."""
    of_model = set_in(getattr(call.model, "generation_config", None), name)
    return getattr(generation_config, name) if call.sets(name) or of_model is not None else None


def _pace(call: Request, generation_config: Any) -> Pace:
    count = _own(call, generation_config, "num_assistant_tokens")
    if count is not None:
        return GivenPace(count, _own(call, generation_config, "num_assistant_tokens_schedule"))
    return GivenPace(_COUNT_OF_RANKS, None) if is_split(call.model) else FastestPace()
