"""What `generate` is given, compared with what its cache holds."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.core.token_record import PADDING
from hf_kvret.integration.requests import Request
from hf_kvret.models.versions import CACHE_NAMES

_log = logging.getLogger(__name__)

# Tensors that are not the model's inputs beside ids, or that are compared by themselves.
_NOT_COMPARED = {
    *("input_ids", "inputs", "inputs_embeds", "attention_mask", *CACHE_NAMES),
    *("labels", "cache_position", "logits_to_keep", "inputs_tensor"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "encoder_outputs"),
    *("decoder_input_ids", "decoder_attention_mask"),
}
# In configurations, names of ids that stand for a part of a picture, a video or a sound.
_MARK = re.compile(r"(image|img|video|audio|vision|media|speech|sound)\w*_token\w*_(id|index)$")
# Those of its borders do not.
_BORDER = re.compile(r"start|begin|end|^bo|^eo")


def check_origin(
    call: Request, cache: RetrievalCache, outlives: bool, prepared: torch.Tensor | None = None
) -> None:
    """Compare model and prompt of ``call`` with those that filled ``cache``, and note what is new.

    Args:
        call: of ``generate``.
        cache: that it uses.
        outlives: the caller keeps the cache, so other inputs than ids are worth hashing.
        prepared: the attention mask as ``generate`` prepared it, for a call without one: it masks
            padding tokens.

    Raises:
        ValueError: another model, or a prompt that does not begin with the tokens, pictures and
            positions in the cache.
    """
    cache.meet(call.model)
    cache_len = cache.get_seq_length()
    cache.tokens.crop(cache_len)
    # A call that failed before its first pass noted inputs of tokens that never came.
    cache.tokens.inputs.crop(cache_len)
    ids = call.prompt_ids() if call.arguments.get("inputs_embeds") is None else None
    if ids is None:
        if cache_len and cache.tokens.warn_once("embeddings"):
            _log.warning(
                "the prompt comes as embeddings, which can't be compared with the %d tokens in "
                "past_key_values: if it does not begin with them, the answer is wrong",
                cache_len,
            )
        return
    mask = _mask(call, ids, prepared)
    length = ids.shape[1]
    # As `generate` itself finds that only the new tokens were given.
    whole = mask is None or mask.shape[1] == length
    inputs = other_inputs(call.arguments) if outlives or len(cache.tokens.inputs.entries) else {}
    own = vars(call.model.generation_config)
    inputs = {name: value for name, value in inputs.items() if name not in own}
    if cache_len and whole:
        _check_ids(cache, ids, mask, cache_len)
        _check_inputs(call, cache, ids, mask, inputs)
    count = length - cache_len if whole else length
    if inputs and count > 0:
        places = picture_places(call.model, ids[:, length - count :], cache_len)
        cache.tokens.inputs.note(inputs, (len(ids), length), cache_len, count, mask, places)


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
    if difference is not None and difference.cache_id == PADDING:
        raise ValueError(
            f"the prompt differs from the tokens in past_key_values: in row {difference.row} at "
            f"position {difference.slot} it has id {difference.prompt_id}, the cache holds padding "
            "that its tokens have not seen. Pass an attention_mask of the whole conversation that "
            "is 0 there, or begin anew with cache.reset()"
        )
    if difference is not None:
        row, slot, prompt_id, cache_id = difference
        # Layers with a sliding window or a state can't be cut.
        can_cut = len(cache.retrieval_layers) == len(cache.layers)
        cut = f"cut the cache to what they share with cache.crop({slot - cache_len}), or "
        raise ValueError(
            f"the prompt differs from the tokens in past_key_values: in row {row} at position "
            f"{slot} it has id {prompt_id}, the cache holds {cache_id}. Pass the conversation that "
            f"the cache holds and the new tokens behind it, or {cut if can_cut else ''}begin anew "
            "with cache.reset()"
        )
    hidden = None if mask is None else cache.tokens.hidden(ids, mask, cache_len)
    if hidden is not None and cache.tokens.warn_once("hidden"):
        _log.warning(
            "the attention mask hides the token in row %d at position %d, which later tokens in "
            "past_key_values have seen: they stay as they are. If they should not have seen it, "
            "begin anew with cache.reset()",
            *hidden,
        )
    unknown = cache.tokens.unknown(cache_len)
    if unknown and cache.tokens.warn_once("unknown"):
        _log.warning(
            "%d of the %d tokens in past_key_values came as embeddings, by hand or from a file "
            "without them: the prompt can't be compared with these. If it has others there, the "
            "answer is wrong",
            unknown,
            cache_len,
        )


def picture_places(model: Any, new: torch.Tensor, start: int) -> tuple[int, int] | None:
    """First slot and count of those that stand for pictures or sounds; None if none does.

    Args:
        model: whose configuration says what marks them.
        new: ids ``[B, n]`` of the slots from ``start`` on.
        start: of the first.
    """
    marks = _marks(model)
    if not marks:
        return None
    marked = torch.isin(new, torch.tensor(marks, device=new.device)).any(dim=0).nonzero()
    if not len(marked):
        return None
    first, last = int(marked[0]), int(marked[-1])
    return start + first, last + 1 - first


def _check_inputs(
    call: Request,
    cache: RetrievalCache,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    inputs: dict[str, torch.Tensor],
) -> None:
    record, shape = cache.tokens.inputs, (len(ids), ids.shape[1])
    if not record.entries:
        return
    if "position_ids" not in inputs:
        _check_own_positions(call, cache, ids, mask)
    entry = record.difference(inputs, shape, mask)
    picture = None if entry is not None else record.unknown_picture(inputs, shape)
    if picture is not None:
        cache_len = cache.get_seq_length()
        if not _marks(call.model):
            if cache.tokens.warn_once("pictures"):
                _log.warning(
                    "%s is not what past_key_values was filled with, and the model's configuration "
                    "does not say which tokens stand for it: it is taken for that of new tokens. "
                    "If it is in place of the old, the answer is wrong",
                    picture.name,
                )
        elif picture_places(call.model, ids[:, cache_len:], cache_len) is None:
            entry = picture
    if entry is not None:
        raise ValueError(
            f"{entry.name} is not what the tokens {entry.start} to {entry.end - 1} in "
            "past_key_values were filled with: pass the same, leave it out if the new tokens need "
            "none, or begin anew with cache.reset()"
        )


def _check_own_positions(
    call: Request, cache: RetrievalCache, ids: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Compare positions that the caller gave before with those that ``generate`` counts now."""
    record = cache.tokens.inputs
    own = [entry for entry in record.entries if entry.name == "position_ids" and entry.by_token]
    if not own:
        return
    config = call.model.config
    counted = config is config.get_text_config(decoder=True) and mask is not None
    if counted and mask is not None and all(entry.parts == 1 for entry in own):
        positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        entry = record.difference({"position_ids": positions}, (len(ids), ids.shape[1]), mask)
        if entry is not None:
            raise ValueError(
                f"position_ids is missing: the tokens {entry.start} to {entry.end - 1} in "
                "past_key_values were filled with others than generate counts by itself. Pass "
                "position_ids of the whole conversation, or begin anew with cache.reset()"
            )
    elif cache.tokens.warn_once("positions"):
        _log.warning(
            "past_key_values was filled with position_ids of %d tokens, and the prompt has none: "
            "pass those of the whole conversation, if they are not what the model makes by itself",
            sum(entry.count for entry in own),
        )


def _marks(model: Any) -> list[int]:
    """Ids that stand for pictures and sounds; empty if the configuration does not say them."""
    return [
        value
        for name, value in vars(model.config).items()
        if isinstance(value, int) and _MARK.search(name) and not _BORDER.search(name)
    ]


def _mask(call: Request, ids: torch.Tensor, prepared: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, T]`` mask that the call uses, 0 is padding; None for masks of another kind."""
    mask = call.arguments.get("attention_mask")
    if mask is None and isinstance(prepared, torch.Tensor) and prepared.ndim == 2:
        # Rows were repeated for beams.
        mask = prepared[:: max(1, len(prepared) // len(ids))]
    if mask is None:
        return torch.ones_like(ids)
    return mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
