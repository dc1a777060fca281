"""What modules compute by beside their weights, which no configuration shows.

A hook, a function in place of another one or a router's ``top_k`` may leave rows as they are, or
make them another model's. So the first tokens are read again, and compared, where modules changed
and where a cache comes from a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_kvret.models.exact_chunks import depends_on_length, why_whole
from hf_kvret.models.kept_state import read_state, write_state
from hf_kvret.models.ranks import is_split
from hf_kvret.models.versions import cache_name_of
from hf_kvret.saved.token_record import UNKNOWN, ids_of_pictures
from hf_kvret_model_patches.decoders import decoder_of

_TOKENS = 16
# Other sizes of passes, kernels and devices move rows by about a rounding error a layer.
_ROUNDINGS, _LEAST_TOLERANCE = 8, 2.0**-8


def modules_state(decoder: nn.Module) -> int:
    """A hash of all of ``decoder``'s modules: equal, in this process, as long as nothing changes.

    It covers classes, functions put in place of others, hooks but for ours and PEFT's (adapters
    have facts of their own), numbers such as a router's ``top_k``, and buffers such as frequencies.
    """
    return hash(tuple(mark for module in decoder.modules() for mark in _marks(module)))


def _marks(module: Any) -> Iterator[Any]:
    yield type(module)
    yield type(module).forward
    for name, value in vars(module).items():
        if isinstance(value, int | float | str):
            yield name, value
        elif callable(value):
            yield name, id(value)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        yield from (id(hook) for hook in hooks.values() if not _is_known(hook))
    for buffer in module._buffers.values():
        if buffer is not None:
            yield buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version


def _is_known(hook: Callable[..., Any]) -> bool:
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return home.split(".")[0] in ("hf_kvret", "peft")


def check_rows(cache: Any, model: PreTrainedModel, owner: str) -> None:
    """ValueError where ``model`` makes other rows of the first tokens than a filled cache holds.

    They are compared with a tolerance for rounding. Nothing is compared where the beginning of a
    text alone does not tell its rows: padding, embeddings, pictures, a model that reads a prompt as
    a whole, dropout, weights elsewhere.

    Args:
        cache: a ``RetrievalCache`` that holds tokens.
        model: that is to use it.
        owner: the cache, in the message.
    """
    config, decoder, ids = model.config, decoder_of(model), _first_ids(cache, model.config)
    is_here = not is_split(model) and not any(one.is_meta for one in decoder.parameters())
    is_exact = not (why_whole(config) or depends_on_length(config) or decoder.training)
    cls: Any = type(decoder)
    parameters = inspect.signature(cls.forward).parameters
    # Such a decoder may not read text alone.
    is_text = not (cache.tokens.passes and "pixel_values" in parameters)
    if ids is None or not ids.shape[1] or not (is_here and is_exact and is_text):
        return
    read, kept = DynamicCache(config=config), read_state(model)
    inputs: dict[str, Any] = {"input_ids": ids.to(decoder.device), "use_cache": True}
    # As `generate` counts them, where a model would count from its padding id.
    if "position_ids" in parameters:
        inputs["position_ids"] = torch.arange(ids.shape[1], device=decoder.device)[None]
    try:
        with torch.no_grad():
            decoder(**inputs, **{cache_name_of(cls): read})
    finally:
        write_state(model, kept)
    for layer in cache.retrieval_layers:
        number = layer.layer_info.number
        now: Any = read.layers[number]
        pairs = zip(layer.rows_of(now.keys, now.values), layer.kv.rows(ids.shape[1]), strict=True)
        for new, held in pairs:
            tolerance = max(_ROUNDINGS * torch.finfo(held.dtype).eps, _LEAST_TOLERANCE)
            error, size = (one.float().norm(dim=(1, 3)) for one in (new - held, held))
            is_same = error <= tolerance * size
            # Of a few tokens a router may choose other experts by rounding alone.
            if int(is_same.sum()) * 2 <= is_same.numel():
                raise ValueError(
                    f"{owner} was filled by another computation: layer {number} of the model now "
                    f"makes other rows of its first {ids.shape[1]} tokens. Take away what changed "
                    "its modules (hooks, functions, attributes), or fill a new cache; "
                    "cache.forget_origin(), of one loaded without model=, goes on with these rows"
                )


def _first_ids(cache: Any, config: Any) -> torch.Tensor | None:
    """``[B, n]``, the first tokens whose keys a cache holds as they came, as far as they are text.

    None where nobody saw the tokens, or a sequence may begin with padding.
    """
    layer, ids, text = (
        cache.retrieval_layers[0],
        cache.input_ids,
        config.get_text_config(decoder=True),
    )
    kv, slots = layer.kv, layer.kv.window.sink_slots
    # A layer whose model names the tokens is not told of padding.
    if ids is None or layer.has_padding or (kv.index is None and len(ids) > 1):
        return None
    # Once tokens are cold, sinks tell where sequences begin. A single one is seldom padded.
    pads = getattr(text, "pad_token_id", None), getattr(text, "eos_token_id", None)
    is_known = bool(slots.numel()) and bool((slots >= 0).all())
    if is_known and bool(slots.amin(dim=1).any()):
        return None
    if not is_known and (len(ids) > 1 or int(ids[0, 0]) in pads):
        return None
    stores = [one.kv.store for one in cache.retrieval_layers if one.kv is not None]
    is_coded = any(store is not None and store.codes_rows for store in stores)
    ids = ids[:, : kv.window.sink if is_coded else _TOKENS]
    no_text = torch.tensor([UNKNOWN, *ids_of_pictures(config)], device=ids.device)
    others = torch.isin(ids, no_text).any(0).nonzero()
    return ids[:, : int(others[0])] if len(others) else ids
