"""Start a prompt from its longest saved prefix, and save the whole prompt afterwards."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.chunks import is_assisted
from hf_kvret.generate.requests import Request
from hf_kvret.models.compatibility import check_model
from hf_kvret.shelf import Shelf
from hf_kvret.shelf.entry import BLOCK
from hf_kvret.shelf.shelf import can_crop

_log = logging.getLogger(__name__)

SHELF, STEP = "shelf", "shelf_step"
"""Names in ``cache_config``."""
USUAL_STEP = 2048
"""New tokens from which on a prompt is put, where a call does not say."""
_TEXT = {"inputs", "input_ids", "attention_mask"}
_TYPES = {"token_type_ids", "mm_token_type_ids"}
# Disks, files and memory fail with these. An answer can be given without a shelf.
_FAILURES = (OSError, RuntimeError, MemoryError, ValueError)


def new_cache(
    call: Request, method: type[RetrievalCache], generation_config: Any, mask: Any
) -> RetrievalCache:
    """A cache for ``call``, with what a shelf knows of its prompt where the options name one.

    Args:
        call: a call of ``generate`` that names a method.
        method: the class of that name.
        generation_config: of the call, as ``generate`` has prepared it. Its ``cache_config`` has
            options of the method; ``shelf``, a folder or a ``Shelf``; and ``shelf_step``, the
            number of new tokens from which on a prompt is put.
        mask: the attention mask, likewise, or None.

    Raises:
        TypeError, ValueError: options that are unknown or make no sense, or a shelf on which a
            prompt can't be put, now or later.
    """
    check_model(call.model)
    options = generation_config.cache_config or {}
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise TypeError(f"cache_config must be a dict of options by name, got {options!r}")
    options = dict(options)
    step, place = options.pop(STEP, None), options.pop(SHELF, None)
    if place is None:
        if step is not None:
            raise ValueError(f"{STEP}={step!r} without {SHELF}: name its folder too")
        return method(call.model.config, **options)
    if not isinstance(place, str | os.PathLike | Shelf):
        raise TypeError(f"{SHELF}={place!r}: pass a folder, or a hf_kvret.Shelf")
    step = USUAL_STEP if step is None else step
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
    length, can_go_back = ids.shape[1], can_crop(cache, ids.shape[1])
    # Where the prompt was put, fewer are left to read.
    least = 2 if can_go_back else 2 * cache.options.max_draft + 2
    step = BLOCK if length < BLOCK else max(step, least if cache.from_shelf else 1)
    if (new := length - cache.from_shelf) < step:
        cache.shelf_note = f"not put: {new} new tokens, fewer than {step}"
        return cache
    shelf.check_writable()
    call.keep_prompt = partial(_keep_prompt, shelf, cache, call, ids)
    return cache


def _obstacle(call: Request, generation_config: Any, mask: Any) -> str:
    """Why the prompt of ``call`` is none for a shelf; empty if it is."""
    ids, mask = call.prompt_ids(), call.mask(mask)
    if ids is None:
        return "the prompt has no token ids"
    if len(ids) > 1:
        return f"{len(ids)} prompts, and it holds caches of one"
    if is_assisted(call, generation_config):
        return "assisted decoding of transformers reads the whole prompt again"
    if isinstance(mask, torch.Tensor) and not bool(mask.all()):
        return "the prompt has padding"
    if generation_config.output_hidden_states and generation_config.return_dict_in_generate:
        return "output_hidden_states asks for those of the whole prompt"
    given = {name: x for name, x in call.arguments.items() if isinstance(x, torch.Tensor)}
    # Types of tokens are zero where all are text.
    more = [x for x in given if x not in _TEXT and (x not in _TYPES or bool(given[x].any()))]
    return f"the prompt is more than text ({', '.join(more)})" if more else ""


def _keep_prompt(shelf: Shelf, cache: RetrievalCache, call: Request, ids: torch.Tensor) -> None:
    """Put the prompt ``ids`` once it is whole; called before each pass, and when ``call`` ends.

    Where that fails, the answer is there all the same.
    """
    lengths = [one.get_seq_length() for one in cache.retrieval_layers]
    if min(lengths) < max(*lengths, ids.shape[1]):
        # The prompt is not whole, as where a pass broke off.
        return
    call.keep_prompt = lambda: None
    try:
        whole = cache
        if cache.retrieval_layers[0].batch_size > 1:
            # All its rows begin with the prompt.
            whole = cache.fork()
            whole.reorder_cache(ids.new_zeros(1))
        cache.shelf_note = f"put as {shelf.put(whole, ids, call.model).name}"
    except _FAILURES as error:
        cache.shelf_note = f"not put: {error}"
        _log.warning("the prompt was not put on the shelf %s: %s", shelf.folder, error)
