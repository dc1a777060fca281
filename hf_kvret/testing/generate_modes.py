"""Modes of ``generate``: each function plays one on the cache of a scenario."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from hf_kvret.models.versions import as_argument, cache_of
from hf_kvret.testing.scenario import (
    NEW_TOKENS,
    Scenario,
    attempt,
    dynamic_cache,
    prompt,
    ragged,
    recurrent_layers,
    sliding_layers,
)

RAGGED_LENGTHS = (61, 40, 52)


def no_reset(model: PreTrainedModel) -> str | None:
    """Reason against models with layers that stay transformers' own and can't be reset."""
    if not (recurrent_layers(model) or sliding_layers(model)):
        return None
    tried = attempt(reset, model, partial(dynamic_cache, model))
    return tried if isinstance(tried, str) else None


def no_reset_other_batch(model: PreTrainedModel) -> str | None:
    """Reason against models that can't be reset, or only to as many rows."""
    if recurrent_layers(model):
        return "transformers' recurrent layers keep their number of rows after a reset"
    return no_reset(model)


def greedy(s: Scenario) -> None:
    """The plain call: token ids and nothing else comes back."""
    ids = s.model.generate(
        prompt(1, 60), **as_argument(s.cache()), max_new_tokens=16, do_sample=False
    )
    s.record("tokens", ids)


def greedy_ragged(s: Scenario) -> None:
    """A batch with padding on the left."""
    ids, mask = ragged(RAGGED_LENGTHS)
    s.generate(ids, s.cache(), attention_mask=mask)


def return_dict(s: Scenario) -> None:
    """Everything that return_dict_in_generate offers but attentions, and the same cache."""
    ids, mask = ragged((40, 55))
    cache = s.cache()
    result = s.model.generate(
        ids,
        attention_mask=mask,
        **as_argument(cache),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.1,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    s.record("tokens", result.sequences)
    s.record("logits", torch.stack(result.logits))
    s.record("scores", torch.stack(result.scores))
    s.record("last hidden states", torch.stack([step[-1] for step in result.hidden_states[1:]]))
    s.record("returned cache is ours", torch.tensor(cache_of(result) is cache))


def sampling(s: Scenario) -> None:
    """Sampling with a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        s.generate(prompt(2, 57), s.cache(), do_sample=True, temperature=1.3, top_k=40)


def return_sequences(s: Scenario) -> None:
    """Several samples of every prompt: rows are repeated after the prompt."""
    ids, mask = ragged((48, 41))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        s.generate(
            ids, s.cache(), attention_mask=mask, do_sample=True, top_k=40, num_return_sequences=3
        )


def beams(s: Scenario) -> None:
    """Beam search: rows of the cache are reordered at every step."""
    s.generate(prompt(1, 54), s.cache(), num_beams=4)


def beams_ragged(s: Scenario) -> None:
    """Beam search on a padded batch, all beams returned."""
    ids, mask = ragged((43, 58))
    s.generate(ids, s.cache(), attention_mask=mask, num_beams=4, num_return_sequences=4)


def assisted(s: Scenario) -> None:
    """A draft model proposes, with a cache of its own; some of its tokens are dropped again."""
    draft = _draft_of(s.model)
    s.generate(prompt(1, 62), s.cache(), max_new_tokens=16, assistant_model=draft)


def prompt_lookup(s: Scenario) -> None:
    """Drafts are copied out of the prompt, which repeats itself."""
    ids = torch.cat([prompt(1, 20)] * 3, dim=1)
    s.generate(ids, s.cache(), max_new_tokens=16, prompt_lookup_num_tokens=5)


def early_exit(s: Scenario) -> None:
    """The model's own first layer drafts, a few tokens at a time."""
    config = getattr(s.model, s.model.base_model_prefix).config
    depth = getattr(config, "num_hidden_layers", None)
    _draft_constantly(s.model)
    try:
        s.generate(prompt(1, 59), s.cache(), max_new_tokens=14, assistant_early_exit=1)
    finally:
        # Where a draft fails, transformers leaves the model cut short.
        if depth is not None:
            config.num_hidden_layers = depth


def chunked_prefill(s: Scenario) -> None:
    """The prompt in chunks of seven tokens; the shortest row begins in a later chunk."""
    ids, mask = ragged((61, 40, 52), salt=1)
    s.generate(ids, s.cache(), attention_mask=mask, prefill_chunk_size=7)


def prefill_by_token(s: Scenario) -> None:
    """The prompt token by token, so that no forward pass looks like a prompt."""
    ids, mask = ragged((36, 27), salt=2)
    s.generate(ids, s.cache(), attention_mask=mask, prefill_chunk_size=1)


def second_turn(s: Scenario) -> None:
    """Turns of a talk in one cache: a short question, and one longer than a draft."""
    cache = s.cache()
    ids = s.generate(prompt(1, 50), cache, "turn 1", max_new_tokens=8)
    for turn, length in ((2, 3), (3, 30)):
        ids = torch.cat([ids, prompt(1, length, salt=turn)], dim=1)
        ids = s.generate(ids, cache, f"turn {turn}", max_new_tokens=8)


def second_turn_ragged(s: Scenario) -> None:
    """Turns of a padded batch: the second turn's padding leaves holes in the middle."""
    cache = s.cache()
    ids, mask = ragged((55, 40, 48))
    for turn, lengths in ((1, None), (2, (2, 5, 3)), (3, (9, 27, 18))):
        if lengths is not None:
            question, question_mask = ragged(lengths, salt=turn)
            ids = torch.cat([ids, question], dim=1)
            mask = torch.cat([mask, question_mask], dim=1)
        answer = s.generate(
            ids, cache, f"turn {turn}", attention_mask=mask, max_new_tokens=NEW_TOKENS - 4
        )
        new = answer.shape[1] - ids.shape[1]
        ids, mask = answer, torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)


def inputs_embeds(s: Scenario) -> None:
    """The prompt as embeddings, padded on the left."""
    ids, mask = ragged((45, 60))
    with torch.no_grad():
        embeds = s.model.get_input_embeddings()(ids)
    s.generate(None, s.cache(), inputs_embeds=embeds, attention_mask=mask)


def own_position_ids(s: Scenario) -> None:
    """Positions with a jump in the middle of the prompt, given to ``generate``."""
    ids = prompt(1, 60)
    positions = torch.arange(60).unsqueeze(0)
    positions[:, 35:] += 200
    s.generate(ids, s.cache(), position_ids=positions)


def guidance(s: Scenario) -> None:
    """Classifier-free guidance: transformers runs the negative prompt in a cache of its own."""
    s.generate(
        prompt(1, 51), s.cache(), guidance_scale=1.5, negative_prompt_ids=prompt(1, 44, salt=1)
    )


def reset(s: Scenario) -> None:
    """A cache used, reset, and used again for another text, padded otherwise."""
    cache = s.cache()
    ids, mask = ragged((60, 47))
    s.generate(ids, cache, "before", attention_mask=mask)
    cache = s.reset(cache)
    s.record("length after reset", torch.tensor(cache.get_seq_length()))
    ids, mask = ragged((41, 52), salt=1)
    s.generate(ids, cache, "after", attention_mask=mask)


def reset_other_batch(s: Scenario) -> None:
    """A cache used, reset, and used again with more rows."""
    cache = s.cache()
    s.generate(prompt(1, 50), cache, "before", max_new_tokens=8)
    cache = s.reset(cache)
    ids, mask = ragged((60, 47), salt=1)
    s.generate(ids, cache, "after", attention_mask=mask)


def _draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that is often right: the model itself with its weights shaken."""
    draft = copy.deepcopy(model)
    draft.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.05 * parameter.std(correction=0) * noise)
    _draft_constantly(draft)
    return draft


def _draft_constantly(draft: PreTrainedModel) -> None:
    """Always five tokens a draft, however many of the last ones were right."""
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0


PLAYS: tuple[Callable[[Scenario], None], ...] = (
    greedy,
    greedy_ragged,
    return_dict,
    sampling,
    return_sequences,
    beams,
    beams_ragged,
    assisted,
    prompt_lookup,
    early_exit,
    chunked_prefill,
    prefill_by_token,
    second_turn,
    second_turn_ragged,
    inputs_embeds,
    own_position_ids,
    guidance,
    reset,
    reset_other_batch,
)
"""Modes that go through ``generate`` alone."""

OBSTACLES = {reset: no_reset, reset_other_batch: no_reset_other_batch}
"""Reasons against a mode on a model that a failure would not tell."""
