"""Modes of use: every way in which generate, or a loop of one's own, works with a cache.

Each function plays one on the cache of a scenario. Those of ``_GENERATE`` go through ``generate``
alone, those of ``_DIRECT`` call the model themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.models.versions import as_argument, cache_of
from hf_kvret.testing.scenario import (
    NEW_TOKENS,
    CacheMaker,
    Outcome,
    Scenario,
    attempt,
    dynamic_cache,
    recurrent_layers,
)


@dataclass(frozen=True)
class Mode:
    """One way to use a cache.

    Attributes:
        name: key in ``MODES``.
        play: uses the cache of a scenario and records what came out.
        direct: the mode calls the model itself, not only through ``generate``; a cache that
            needs the model prepared for that must have it done.
        obstacle: says why a model can't do it where transformers would not raise.
    """

    name: str
    play: Callable[[Scenario], None]
    direct: bool
    obstacle: Callable[[PreTrainedModel], str | None] | None = None

    def run(self, model: PreTrainedModel, make_cache: CacheMaker | None = None) -> Outcome:
        """Return what `model` gives with the caches of `make_cache` (None: the reference)."""
        scenario = Scenario(model, make_cache)
        self.play(scenario)
        return scenario.outcome

    def reference(self, model: PreTrainedModel) -> Outcome | str:
        """The outcome with transformers' own cache, or the reason why there is none."""
        reason = None if self.obstacle is None else self.obstacle(model)
        if reason is not None:
            return reason
        outcome = attempt(self.play, model, None)
        if isinstance(outcome, str):
            return f"transformers' own cache fails too: {outcome}"
        return outcome


_RAGGED_LENGTHS = (61, 40, 52)


def no_reset(model: PreTrainedModel) -> str | None:
    """Reason against models with layers that stay transformers' own and can't be reset."""
    outcome = attempt(reset, model, partial(dynamic_cache, model))
    return outcome if isinstance(outcome, str) else None


def no_reset_other_batch(model: PreTrainedModel) -> str | None:
    """Reason against models that can't be reset, or only to as many sequences."""
    if recurrent_layers(model):
        return "transformers' recurrent layers keep their number of rows after a reset"
    return no_reset(model)


def greedy(s: Scenario) -> None:
    """The plain call: token ids and nothing else comes back."""
    ids = s.model.generate(
        s.prompt(1, 60), **as_argument(s.cache()), max_new_tokens=12, do_sample=False
    )
    s.record("tokens", ids)


def greedy_ragged(s: Scenario) -> None:
    """A batch with padding on the left."""
    ids, mask = s.ragged(_RAGGED_LENGTHS)
    s.generate(ids, s.cache(), attention_mask=mask)


def return_dict(s: Scenario) -> None:
    """Everything that return_dict_in_generate offers but attentions, and the same cache."""
    ids, mask = s.ragged((40, 55))
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
        s.generate(s.prompt(2, 57), s.cache(), do_sample=True, temperature=1.3, top_k=40)


def return_sequences(s: Scenario) -> None:
    """Several samples of every prompt: its sequences are repeated after the prompt."""
    ids, mask = s.ragged((48, 41))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        s.generate(
            ids, s.cache(), attention_mask=mask, do_sample=True, top_k=40, num_return_sequences=3
        )


def beams(s: Scenario) -> None:
    """Beam search: sequences of the cache are reordered at every step."""
    s.generate(s.prompt(1, 54), s.cache(), num_beams=4)


def beams_ragged(s: Scenario) -> None:
    """Beam search on a padded batch, all beams returned."""
    ids, mask = s.ragged((43, 58))
    s.generate(ids, s.cache(), attention_mask=mask, num_beams=4, num_return_sequences=4)


def assisted(s: Scenario) -> None:
    """A draft model proposes, with a cache of its own; some of its tokens are dropped again."""
    draft = _draft_of(s.model)
    s.generate(s.prompt(1, 62), s.cache(), max_new_tokens=12, assistant_model=draft)


def prompt_lookup(s: Scenario) -> None:
    """Drafts are copied out of the prompt, which repeats itself."""
    ids = torch.cat([s.prompt(1, 20)] * 3, dim=1)
    s.generate(ids, s.cache(), max_new_tokens=12, prompt_lookup_num_tokens=5)


def early_exit(s: Scenario) -> None:
    """The model's own first layer drafts, a few tokens at a time."""
    config = getattr(s.model, s.model.base_model_prefix).config
    depth = getattr(config, "num_hidden_layers", None)
    _draft_constantly(s.model)
    try:
        s.generate(s.prompt(1, 59), s.cache(), max_new_tokens=14, assistant_early_exit=1)
    finally:
        # Where a draft fails, transformers leaves the model cut short.
        if depth is not None:
            config.num_hidden_layers = depth


def chunked_prefill(s: Scenario) -> None:
    """The prompt in chunks of seven tokens; the shortest sequence begins in a later chunk."""
    ids, mask = s.ragged(_RAGGED_LENGTHS, salt=1)
    s.generate(ids, s.cache(), attention_mask=mask, prefill_chunk_size=7)


def prefill_by_token(s: Scenario) -> None:
    """The prompt token by token, so that no forward pass looks like a prompt."""
    ids, mask = s.ragged((36, 27), salt=2)
    s.generate(ids, s.cache(), attention_mask=mask, prefill_chunk_size=1)


def second_turn(s: Scenario) -> None:
    """Turns of a talk in one cache: a short question, and one longer than a draft."""
    cache = s.cache()
    ids = s.generate(s.prompt(1, 50), cache, "turn 1", max_new_tokens=8)
    for turn, length in ((2, 3), (3, 30)):
        ids = torch.cat([ids, s.prompt(1, length, salt=turn)], dim=1)
        ids = s.generate(ids, cache, f"turn {turn}", max_new_tokens=8)


def second_turn_ragged(s: Scenario) -> None:
    """Turns of a padded batch: the second turn's padding leaves holes in the middle."""
    cache = s.cache()
    ids, mask = s.ragged((55, 40, 48))
    for turn, lengths in ((1, None), (2, (2, 5, 3)), (3, (9, 27, 18))):
        if lengths is not None:
            question, question_mask = s.ragged(lengths, salt=turn)
            ids = torch.cat([ids, question], dim=1)
            mask = torch.cat([mask, question_mask], dim=1)
        answer = s.generate(ids, cache, f"turn {turn}", attention_mask=mask, max_new_tokens=6)
        new = answer.shape[1] - ids.shape[1]
        ids, mask = answer, torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)


def inputs_embeds(s: Scenario) -> None:
    """The prompt as embeddings, padded on the left."""
    ids, mask = s.ragged((45, 60))
    with torch.no_grad():
        embeds = s.model.get_input_embeddings()(ids)
    s.generate(None, s.cache(), inputs_embeds=embeds, attention_mask=mask)


def own_position_ids(s: Scenario) -> None:
    """Positions with a jump in the middle of the prompt, given to ``generate``."""
    ids = s.prompt(1, 60)
    positions = torch.arange(60, device=s.device).unsqueeze(0)
    positions[:, 35:] += 200
    s.generate(ids, s.cache(), position_ids=positions)


def guidance(s: Scenario) -> None:
    """Classifier-free guidance: transformers runs the negative prompt in a cache of its own."""
    s.generate(
        s.prompt(1, 51), s.cache(), guidance_scale=1.5, negative_prompt_ids=s.prompt(1, 44, salt=1)
    )


def reset(s: Scenario, lengths: Sequence[tuple[int, ...]] = ((60, 47), (41, 52))) -> None:
    """A cache used, reset, and used again for another text, padded otherwise."""
    cache = s.cache()
    ids, mask = s.ragged(lengths[0])
    s.generate(ids, cache, "before", attention_mask=mask)
    cache = s.reset(cache)
    s.record("length after reset", torch.tensor(cache.get_seq_length()))
    ids, mask = s.ragged(lengths[1], salt=1)
    s.generate(ids, cache, "after", attention_mask=mask)


def reset_other_batch(s: Scenario) -> None:
    """A cache used, reset, and used again with more sequences."""
    cache = s.cache()
    s.generate(s.prompt(1, 50), cache, "before", max_new_tokens=8)
    cache = s.reset(cache)
    ids, mask = s.ragged((60, 47), salt=1)
    s.generate(ids, cache, "after", attention_mask=mask)


def _draft_of(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that is often right: the model itself with its weights shaken."""
    draft = copy.deepcopy(model)
    draft.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(0.05 * parameter.std(correction=0) * noise)
    _draft_constantly(draft)
    return draft


def _draft_constantly(draft: PreTrainedModel) -> None:
    """Always five tokens a draft, however many of the last ones were right."""
    draft.generation_config.num_assistant_tokens = 5
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0


def no_crop(model: PreTrainedModel) -> str | None:
    """Reason against models that can't go back, though transformers lets them try."""
    return "a recurrent state can't be cropped" if model._is_stateful else None


def loop(s: Scenario) -> None:
    """A loop of one's own over a padded batch: prompt, then one token at a time."""
    ids, mask = s.ragged((50, 41))
    more = s.prompt(2, 10, salt=1)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    cache = s.cache()
    s.forward(ids, cache, "prompt", mask, keep=1)
    s.feed(more, cache, "step", mask)


def loop_positions(s: Scenario) -> None:
    """A loop of one's own with positions that jump between the parts of a text."""
    cache = s.cache()
    start = 0
    for part, (jump, length) in enumerate(((0, 30), (300, 25), (40, 3), (500, 1), (1, 1))):
        start += jump
        positions = torch.arange(start, start + length, device=s.device).unsqueeze(0)
        s.forward(s.prompt(1, length, salt=part), cache, f"part {part}", positions=positions)
        start += length


def crop_small(s: Scenario) -> None:
    """Drafted tokens dropped again, over and over, as many as no flush can have moved.

    Counts come as ints and, as transformers 5.17 drafts, as 0-dim tensors.
    """
    cache = s.cache()
    cache.activate_past_recording()
    s.forward(s.prompt(1, 45), cache, "prompt", keep=1)
    cache.crop(0)
    for step, drop in enumerate((2, 4, 1, 5, 3, 0, 2)):
        s.forward(s.prompt(1, 6, salt=step), cache, f"draft {step}")
        count: Any = -drop if step % 2 else torch.tensor(-drop)
        cache.crop(count)
    s.forward(s.prompt(1, 1, salt=9), cache, "after")


def crop_deep(s: Scenario) -> None:
    """Half of the text dropped: tokens that left the window long ago become the newest ones."""
    ids, mask = s.ragged((60, 50))
    more = s.prompt(2, 28, salt=1)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    cache = s.cache()
    cache.activate_past_recording()
    s.forward(ids, cache, "prompt", mask, keep=1)
    s.feed(more[:, :6], cache, "before", mask)
    cache.crop(-34)
    s.feed(more[:, 6:12], cache, "after", mask)
    cache.crop(-5)
    s.forward(more[:, 12:24], cache, "second prompt", mask)
    s.feed(more[:, 24:], cache, "end", mask)


def batch_repeat_interleave(s: Scenario) -> None:
    """Every sequence continued in two ways, before and after the first step."""
    ids, mask = s.ragged((52, 43))
    cache = s.cache()
    s.forward(ids, cache, None, mask)
    cache.batch_repeat_interleave(2)
    mask = torch.cat([mask.repeat_interleave(2, dim=0), mask.new_ones(4, 9)], dim=1)
    s.feed(s.prompt(4, 9, salt=1), cache, "four sequences", mask)
    cache.batch_repeat_interleave(2)
    mask = torch.cat([mask.repeat_interleave(2, dim=0), mask.new_ones(8, 6)], dim=1)
    s.feed(s.prompt(8, 6, salt=2), cache, "eight sequences", mask)


def batch_select_indices(s: Scenario) -> None:
    """Some sequences of a batch go on, in another order."""
    ids, mask = s.ragged((42, 55, 47, 50))
    cache = s.cache()
    s.forward(ids, cache, None, mask)
    for step, sequences in enumerate(([3, 0, 2], [1, 0])):
        indices, count = torch.tensor(sequences, device=s.device), len(sequences)
        cache.batch_select_indices(indices)
        mask = torch.cat([mask[indices], mask.new_ones(count, 8)], dim=1)
        s.feed(s.prompt(count, 8, salt=step), cache, f"{count} sequences", mask)


def prefix_reuse(s: Scenario) -> None:
    """One prefilled text, a copy of its cache for each question; the original stays as it was."""
    prefix = s.prompt(1, 55)
    original = s.cache()
    s.forward(prefix, original, None)
    for number, length in enumerate((4, 20, 1, 4)):
        question = s.prompt(1, length, salt=length)
        twin = s.register(copy.deepcopy(original))
        ids = torch.cat([prefix, question], dim=1)
        s.generate(ids, twin, f"question {number}", max_new_tokens=8)
        s.record(f"prefix length {number}", torch.tensor(original.get_seq_length()))
    s.feed(s.prompt(1, 3, salt=7), original, "original")


_GENERATE: tuple[Callable[[Scenario], None], ...] = (
    *(greedy, greedy_ragged, return_dict, sampling, return_sequences, beams, beams_ragged),
    *(assisted, prompt_lookup, early_exit, chunked_prefill, prefill_by_token),
    *(second_turn, second_turn_ragged, inputs_embeds, own_position_ids, guidance),
    *(reset, reset_other_batch),
)
_DIRECT: tuple[Callable[[Scenario], None], ...] = (
    *(loop, loop_positions, crop_small, crop_deep),
    *(batch_repeat_interleave, batch_select_indices, prefix_reuse),
)
# A failure would not tell these reasons against a mode on a model.
_OBSTACLES: dict[Callable[[Scenario], None], Callable[[PreTrainedModel], str | None]] = {
    reset: no_reset,
    reset_other_batch: no_reset_other_batch,
    crop_small: no_crop,
    crop_deep: no_crop,
}

MODES: dict[str, Mode] = {
    play.__name__: Mode(play.__name__, play, play in _DIRECT, _OBSTACLES.get(play))
    for play in (*_GENERATE, *_DIRECT)
}
"""All modes by name, those of ``generate`` first."""
