"""Modes that call the model itself: each function plays one on the cache of a scenario."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.testing.scenario import Scenario, prompt, ragged


def no_crop(model: PreTrainedModel) -> str | None:
    """Reason against models that can't go back, though transformers lets them try."""
    return "a recurrent state can't be cropped" if model._is_stateful else None


def loop(s: Scenario) -> None:
    """A loop of one's own over a padded batch: prompt, then one token at a time."""
    ids, mask = ragged((50, 41))
    more = prompt(2, 10, salt=1)
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
        positions = torch.arange(start, start + length).unsqueeze(0)
        s.forward(prompt(1, length, salt=part), cache, f"part {part}", positions=positions)
        start += length


def crop_small(s: Scenario) -> None:
    """Drafted tokens dropped again, over and over, as many as no flush can have moved.

    Counts come as ints and, as transformers 5.17 drafts, as 0-dim tensors.
    """
    cache = s.cache()
    cache.activate_past_recording()
    s.forward(prompt(1, 45), cache, "prompt", keep=1)
    cache.crop(0)
    for step, drop in enumerate((2, 4, 1, 5, 3, 0, 2)):
        s.forward(prompt(1, 6, salt=step), cache, f"draft {step}")
        count: Any = -drop if step % 2 else torch.tensor(-drop)
        cache.crop(count)
    s.forward(prompt(1, 1, salt=9), cache, "after")


def crop_deep(s: Scenario) -> None:
    """Half of the text dropped: tokens that left the window long ago become the newest ones."""
    ids, mask = ragged((60, 50))
    more = prompt(2, 40, salt=1)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    cache = s.cache()
    cache.activate_past_recording()
    s.forward(ids, cache, "prompt", mask, keep=1)
    s.feed(more[:, :12], cache, "before", mask)
    cache.crop(-40)
    s.feed(more[:, 12:24], cache, "after", mask)
    cache.crop(-5)
    s.forward(more[:, 24:36], cache, "second prompt", mask)
    s.feed(more[:, 36:], cache, "end", mask)


def batch_repeat_interleave(s: Scenario) -> None:
    """Every row of a prompt continued in two ways, before and after the first step."""
    ids, mask = ragged((52, 43))
    cache = s.cache()
    s.forward(ids, cache, None, mask)
    cache.batch_repeat_interleave(2)
    mask = torch.cat([mask.repeat_interleave(2, dim=0), torch.ones(4, 9).long()], dim=1)
    s.feed(prompt(4, 9, salt=1), cache, "four rows", mask)
    cache.batch_repeat_interleave(2)
    mask = torch.cat([mask.repeat_interleave(2, dim=0), torch.ones(8, 6).long()], dim=1)
    s.feed(prompt(8, 6, salt=2), cache, "eight rows", mask)


def batch_select_indices(s: Scenario) -> None:
    """Some rows of a batch go on, in another order."""
    ids, mask = ragged((42, 55, 47, 50))
    cache = s.cache()
    s.forward(ids, cache, None, mask)
    for step, rows in enumerate(([3, 0, 2], [1, 0])):
        chosen = torch.tensor(rows)
        cache.batch_select_indices(chosen)
        new = torch.ones(len(rows), 8).long()
        mask = torch.cat([mask[chosen], new], dim=1)
        s.feed(prompt(len(rows), 8, salt=step), cache, f"{len(rows)} rows", mask)


def prefix_reuse(s: Scenario) -> None:
    """One prefilled text, a copy of its cache for each question; the original stays as it was."""
    prefix = prompt(1, 55)
    original = s.cache()
    s.forward(prefix, original, None)
    for number, length in enumerate((4, 20, 1, 4)):
        question = prompt(1, length, salt=length)
        twin = s.note(copy.deepcopy(original))
        ids = torch.cat([prefix, question], dim=1)
        s.generate(ids, twin, f"question {number}", max_new_tokens=8)
        s.record(f"prefix length {number}", torch.tensor(original.get_seq_length()))
    s.feed(prompt(1, 3, salt=7), original, "original")


PLAYS: tuple[Callable[[Scenario], None], ...] = (
    loop,
    loop_positions,
    crop_small,
    crop_deep,
    batch_repeat_interleave,
    batch_select_indices,
    prefix_reuse,
)
"""Modes that call the model itself."""

OBSTACLES = {crop_small: no_crop, crop_deep: no_crop}
"""Reasons against a mode on a model that a failure would not tell."""
