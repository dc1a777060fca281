"""A call of ``generate`` and a shelf: what is known is loaded, and what was read is put back."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.attention.prompt_chunks import drafts
from hf_kvret.attention.requests import Request
from hf_kvret.cache import RetrievalCache
from hf_kvret.shelf import Shelf
from hf_kvret.shelf.entry import BLOCK
from hf_kvret.shelf.shelf import can_crop

_log = logging.getLogger(__name__)

SHELF, STEP = "shelf", "shelf_step"
"""Names in ``cache_config``."""
_USUAL_STEP = 2048
_TEXT = {"inputs", "input_ids", "attention_mask"}
_TYPES = {"token_type_ids", "mm_token_type_ids"}
# Disks, files and memory fail with these. An answer can be given without a shelf.
_FAILURES = (OSError, RuntimeError, MemoryError, ValueError)


def new_cache(
    call: Request,
    method: type[RetrievalCache],
    options: dict[str, Any],
    generation_config: Any,
    mask: Any,
) -> RetrievalCache:
    """A cache for ``call``, with what a shelf knows of its prompt where ``options`` name one.

    Args:
        call: a call of ``generate`` that names a method.
        method: the class of that name.
        options: ``cache_config``: those of the method; ``shelf``, a folder or a ``Shelf``; and
            ``shelf_step``, the number of new tokens from which on a prompt is put.
        generation_config: of the call, as ``generate`` has prepared it.
        mask: the attention mask, likewise, or None.

    Raises:
        TypeError, ValueError: options that are unknown or make no sense.
    """
    options = dict(options)
    step, place = options.pop(STEP, None), options.pop(SHELF, None)
    if place is None:
        if step is not None:
            raise ValueError(f"{STEP}={step!r} without {SHELF}: name its folder too")
        return method(call.model.config, **options)
    if not isinstance(place, str | os.PathLike | Shelf):
        raise TypeError(f"{SHELF}={place!r}: pass a folder, or a hf_kvret.Shelf")
    step = _USUAL_STEP if step is None else step
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise ValueError(f"{STEP}={step!r}: pass a number of tokens, at least 1")
    shelf = place if isinstance(place, Shelf) else Shelf(place)
    ids, why = call.prompt_ids(), _obstacle(call, generation_config, mask)
    counts = generation_config.num_beams or 1, generation_config.num_return_sequences or 1
    # Made first, so that wrong options raise whatever the shelf does.
    cache = method(call.model.config, **options)
    if ids is not None and not why:
        try:
            cache = shelf.find(ids, call.model, method.name, **options) or cache
        except _FAILURES as error:
            why = str(error)
    if ids is None or why:
        cache.shelf_note = f"not used: {why}"
        _log.warning("the shelf %s is not used: %s", shelf.folder, why)
        return cache
    if cache.from_shelf and max(counts) > 1:
        # The prompt's rows were repeated for beams, or for several answers.
        cache.reorder_cache(ids.new_zeros(max(counts)))
    visit = _Visit(shelf, cache, call.model, ids, step)
    call.after_pass, call.at_end = visit.after_prompt, visit.put
    return cache


def _obstacle(call: Request, generation_config: Any, mask: Any) -> str:
    """Why the prompt of ``call`` is none for a shelf; empty if it is."""
    ids, mask = call.prompt_ids(), call.mask(mask)
    if ids is None:
        return "the prompt has no token ids"
    if len(ids) > 1:
        return f"{len(ids)} prompts, and it holds caches of one"
    if drafts(generation_config) or call.arguments.get("assistant_model") is not None:
        return "assisted decoding of transformers reads the whole prompt again"
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return "the prompt has padding"
    given = {name: x for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    # Types of tokens are zero where all are text.
    more = [x for x in given if x not in _TEXT and (x not in _TYPES or bool(given[x].any()))]
    return f"the prompt is more than text ({', '.join(more)})" if more else ""


class _Visit:
    """A prompt that is read into ``cache``, and put on ``shelf`` once."""

    def __init__(
        self,
        shelf: Shelf,
        cache: RetrievalCache,
        model: PreTrainedModel,
        ids: torch.Tensor,
        step: int,
    ) -> None:
        self._shelf, self._cache, self._model, self._ids = shelf, cache, model, ids
        new = ids.shape[1] - cache.from_shelf
        self._is_read = False
        if ids.shape[1] < BLOCK:
            step = BLOCK
        self._is_over = new < step
        if self._is_over:
            cache.shelf_note = f"not put: {new} new tokens, fewer than {step}"

    def after_prompt(self) -> None:
        """Put what can't go back before anything is generated; called behind the prompt's pass."""
        if not self._is_read and not can_crop(self._cache, later=True):
            self.put()
        self._is_read = True

    def put(self) -> None:
        """Put the prompt; where that fails, the answer is there all the same."""
        if self._is_over:
            return
        self._is_over = True
        cache, folder = self._cache, self._shelf.folder
        try:
            if cache.retrieval_layers[0].batch_size > 1:
                # All its rows begin with the prompt.
                cache = cache.fork()
                cache.reorder_cache(self._ids.new_zeros(1))
            entry = self._shelf.put(cache, self._ids, self._model)
        except _FAILURES as error:
            self._cache.shelf_note = f"not put: {error}"
            _log.warning("the prompt was not put on the shelf %s: %s", folder, error)
        else:
            self._cache.shelf_note = f"put as {entry.name}"
