"""Hooks on a model that note the tokens of a forward pass in the cache that it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.integration.prompt_check import other_inputs, picture_places
from hf_kvret.integration.requests import is_using
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.versions import cache_argument, cache_name_of, name_cache
from hf_kvret_model_patches.decoders import decoder_of


def watch(model: PreTrainedModel) -> None:
    """Have the passes of ``model`` noted. Doing it twice is harmless."""
    for module in _watched(model):
        if _after_pass not in module._forward_hooks.values():
            module.register_forward_pre_hook(_before_pass, with_kwargs=True)
            module.register_forward_hook(_after_pass, with_kwargs=True)


def unwatch(model: PreTrainedModel) -> None:
    """Undo ``watch``. Harmless on a model that is not watched."""
    for module in _watched(model):
        for hooks, options, ours in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, _before_pass),
            (module._forward_hooks, module._forward_hooks_with_kwargs, _after_pass),
        ):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
                options.pop(key, None)


def _watched(model: PreTrainedModel) -> Iterable[nn.Module]:
    """The model and its decoder, which adapters of PEFT call past the model's hooks."""
    return {id(module): module for module in (model, decoder_of(model))}.values()


# The hooks themselves may stand in a graph, with other caches; what is noted is no part of it.
def _before_pass(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Remember where the pass begins, and that the cache and the model belong together."""
    cache = cache_argument(kwargs)
    if not isinstance(cache, RetrievalCache):
        return None
    name_cache(kwargs, cache_name_of(module))
    _note_start(module, cache, args, kwargs)
    return args, kwargs


@not_compiled
def _note_start(
    module: Any, cache: RetrievalCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if cache.tokens.paused:
        return
    start = cache.tokens.start = cache.get_seq_length()
    cache.tokens.crop(start)
    # Steps of one token with the model that is known are not checked: that would cost more than to
    # note them.
    model = cache.met.whole(module)
    if model is None:
        cache.meet(module)
    elif (_count(args, kwargs) > 1 or not start) and not is_using(cache):
        cache.meet(model, read=False)


def _after_pass(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note what a pass that did not fail was given."""
    cache = cache_argument(kwargs)
    if isinstance(cache, RetrievalCache):
        _note_pass(module, cache, args, kwargs)


@not_compiled
def _note_pass(
    module: Any, cache: RetrievalCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note the ids of a pass, and hashes of what else it was given."""
    if cache.tokens.paused:
        return
    ids, start, end = _ids(args, kwargs), cache.tokens.start, cache.get_seq_length()
    # The decoder has noted them before the model. Other counts: the model adds tokens of its own.
    if ids is None or len(cache.tokens) == end or end - start != ids.shape[1]:
        return
    count, mask = end - start, kwargs.get("attention_mask")
    # `generate` makes a new one for each pass; a loop of one's own may write to one for all.
    if isinstance(mask, torch.Tensor) and not is_using(cache):
        mask = mask.clone()
    cache.tokens.note(ids, start, mask)
    # `generate` was told all of them at once.
    if count > 1 and not is_using(cache):
        inputs = other_inputs(kwargs)
        if inputs:
            mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
            places = picture_places(module, ids, start)
            cache.tokens.inputs.note(inputs, (len(ids), count), start, count, mask, places)


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens a row of a pass has."""
    given = kwargs.get("inputs_embeds")
    if given is None:
        given = kwargs.get("input_ids", args[0] if args else None)
    return given.shape[1] if isinstance(given, torch.Tensor) and given.ndim > 1 else 1


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """``[B, n]`` ids that a model was given; None for embeddings."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if kwargs.get("inputs_embeds") is not None or not isinstance(ids, torch.Tensor):
        return None
    return ids if ids.ndim == 2 and not ids.is_floating_point() else None
