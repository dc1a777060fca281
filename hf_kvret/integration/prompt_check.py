"""What `generate` is given, compared with what its cache holds."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.integration.requests import Request

_log = logging.getLogger(__name__)

# Tensors that are not the model's inputs beside ids, or that are compared by themselves.
_NOT_COMPARED = {
    *("input_ids", "inputs", "inputs_embeds", "attention_mask", "past_key_values"),
    *("labels", "cache_position", "logits_to_keep", "inputs_tensor"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "encoder_outputs"),
    *("decoder_input_ids", "decoder_attention_mask"),
}
# In configurations, ids that stand for a part of a picture, a video or a sound.
_MARKS = tuple(
    f"{kind}_token_{end}"
    for kind in ("image", "video", "audio", "vision")
    for end in ("id", "index")
)

# Caches of which it was said that not all their tokens can be compared.
_told: weakref.WeakSet[RetrievalCache] = weakref.WeakSet()


def check_origin(call: Request, cache: RetrievalCache, outlives: bool) -> None:
    """Compare model and prompt of ``call`` with those that filled ``cache``, and note what is new.

    Args:
        call: of ``generate``.
        cache: that it uses.
        outlives: the caller keeps the cache, so other inputs than ids are worth hashing.

    Raises:
        ValueError: another model, or a prompt that does not begin with the tokens, pictures and
            positions in the cache.
    """
    cache.meet(call.model)
    cache_len = cache.get_seq_length()
    cache.tokens.crop(cache_len)
    ids, mask = _prompt(call), call.arguments.get("attention_mask")
    if ids is None:
        return
    mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
    length = ids.shape[1]
    # As `generate` itself finds that only the new tokens were given.
    whole = mask is None or mask.shape[1] == length
    inputs = other_inputs(call.arguments) if outlives or len(cache.tokens.inputs.entries) else {}
    if cache_len and whole:
        _check_ids(cache, ids, mask, cache_len)
        _check_inputs(call, cache, ids, mask, inputs)
    count = length - cache_len if whole else length
    if inputs and count > 0:
        cache.tokens.inputs.note(inputs, (len(ids), length), cache_len, count, mask)


def other_inputs(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors among ``arguments`` that a model is given beside ids, mask and cache."""
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.numel() and name not in _NOT_COMPARED
    }


def _check_ids(
    cache: RetrievalCache, ids: torch.Tensor, mask: torch.Tensor | None, cache_len: int
) -> None:
    difference = cache.tokens.difference(ids, mask, cache_len)
    if difference is not None:
        row, slot, prompt_id, cache_id = difference
        raise ValueError(
            f"the prompt differs from the tokens in past_key_values: in row {row} at position "
            f"{slot} it has id {prompt_id}, the cache holds {cache_id}. Pass the conversation that "
            f"the cache holds and the new tokens behind it, or cut the cache to what they share "
            f"with cache.crop({slot - cache_len}), or begin anew with cache.reset()"
        )
    if cache not in _told:
        _told.add(cache)
        unknown = cache.tokens.unknown(cache_len)
        if unknown:
            _log.info(
                "%d of the %d tokens in past_key_values came as embeddings, by hand or from a file "
                "without them: the prompt can't be compared with these",
                unknown,
                cache_len,
            )


def _check_inputs(
    call: Request,
    cache: RetrievalCache,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    inputs: dict[str, torch.Tensor],
) -> None:
    record = cache.tokens.inputs
    if not inputs or not record.entries:
        return
    new = ids[:, cache.get_seq_length() :]
    shape = len(ids), ids.shape[1]
    entry = record.difference(inputs, shape, mask, not _has_marks(call, new))
    if entry is not None:
        raise ValueError(
            f"{entry.name} is not what the tokens {entry.start} to {entry.end - 1} in "
            "past_key_values were filled with: pass the same, leave it out if the new tokens need "
            "none, or begin anew with cache.reset()"
        )


def _has_marks(call: Request, new: torch.Tensor) -> bool:
    """Whether new ids have a place for pictures; also if the model does not say what marks it."""
    config = call.model.config
    marks = [getattr(config, name, None) for name in _MARKS]
    known = [mark for mark in marks if isinstance(mark, int)]
    return not known or bool(torch.isin(new, torch.tensor(known, device=new.device)).any())


def _prompt(call: Request) -> torch.Tensor | None:
    """``[B, T]`` ids that the call was given; None for embeddings and other prompts."""
    arguments = call.arguments
    if arguments.get("inputs_embeds") is not None:
        return None
    ids = arguments.get("input_ids")
    if ids is None and getattr(call.model, "main_input_name", "input_ids") == "input_ids":
        ids = arguments.get("inputs")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return None
    return ids
