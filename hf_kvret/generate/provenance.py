"""A cache records its model, tokens and other inputs, and ``generate`` compares them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.model_state import add_hooks
from hf_kvret.generate.requests import Request, call_using, check_free
from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.models.compiled import not_compiled
from hf_kvret.models.exact_chunks import why_whole
from hf_kvret.models.versions import CACHE_NAMES, cache_argument, cache_name_of, name_cache
from hf_kvret.saved.identity import newest_identity
from hf_kvret.saved.token_record import EMBEDDINGS, UNKNOWN, InputDigest, ids_of_pictures
from hf_kvret_model_patches.decoders import decoder_of

_log = logging.getLogger(__name__)

# Most pending entries, one for nearly every pass, before all of them are written.
_MOST_PENDING = 256


def check_origin(
    call: Request, cache: RetrievalCache, outlives: bool, prepared: torch.Tensor | None = None
) -> None:
    """ValueError where ``call`` of ``generate`` has another model, text or other input than filled
    its ``cache``, behind what the call drops of it. Digests of new inputs that are no text are
    recorded.

    Args:
        call: is about to begin.
        cache: that it uses.
        outlives: the caller keeps the cache, so inputs that are no text are worth a digest.
        prepared: the attention mask as ``generate`` prepared it, which masks padding tokens.
    """
    cache.check_model(call.model)
    go_back(call, cache)
    record, cache_len = cache.tokens, cache.get_seq_length()
    # A pass or a call that broke off may have recorded more.
    record.owner = None
    record.crop(cache_len)
    embeddings = call.arguments.get(EMBEDDINGS)
    ids = call.prompt_ids() if embeddings is None else None
    prompt = ids if embeddings is None else embeddings
    if prompt is None:
        return
    mask = call.mask(prepared)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        mask = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device)
    # `generate` itself finds so that a prompt has the new tokens alone.
    is_whole = mask.shape[1] == prompt.shape[1]
    first = 0 if is_whole else cache_len
    inputs = _other_inputs(call.arguments) if outlives or record.passes else {}
    if cache_len and is_whole and ids is not None:
        _check_ids(cache, ids, mask)
    if cache_len and is_whole and inputs:
        _check_inputs(call.model, cache, inputs, ids)
    if inputs and first + prompt.shape[1] > cache_len:
        record.passes.append(InputDigest.of(inputs, cache_len, first + prompt.shape[1], first))


def kept_len(call: Request, cache: RetrievalCache) -> int | None:
    """To how many tokens ``cache`` has to go back for the prompt of ``call``; None: it must not.

    Its options say so. The last token of a prompt is read in any case. Tokens that nobody saw the
    ids of, as of embeddings, count as other ones where the known ones differ behind them.
    RuntimeError where another call has the cache.
    """
    ids, mask, cache_len = call.prompt_ids(), call.mask(None), cache.get_seq_length()
    if cache.options.on_divergence != "crop" or ids is None or not cache_len:
        return None
    if not isinstance(mask, torch.Tensor):
        mask = torch.ones_like(ids)
    if mask.shape != ids.shape or call.arguments.get(EMBEDDINGS) is not None:
        return None
    check_free(call, cache)
    difference, same = cache.tokens.difference(ids, mask, cache_len), cache_len
    if difference is not None:
        same, held = difference[1], cache.tokens.ids(cache_len)
        assert held is not None, "some of them differ"
        unknown = (held[:, :same] == UNKNOWN).any(dim=0).nonzero()
        same = int(unknown[0]) if len(unknown) else same
    kept = min(ids.shape[1] - 1, same)
    # Rows that are kept may have seen what would be dropped.
    return 0 if kept < cache_len and why_whole(call.model.config) else kept


def go_back(call: Request, cache: RetrievalCache) -> None:
    """Have ``cache`` go back to what ``call`` keeps of it; a warning tells where that is nothing.

    Twice is harmless.
    """
    length, call.keeps = call.keeps, None
    if length is None:
        return
    cache_len = cache.get_seq_length()
    cache.go_back(length)
    if not cache.get_seq_length():
        _log.warning(
            "the cache can't keep what the prompt shares with its %d tokens, if anything: all of "
            "it is read (on_divergence='crop')",
            cache_len,
        )


def watch(model: PreTrainedModel) -> None:
    """Have the passes of ``model`` recorded in their caches. Doing it twice is harmless."""
    # Adapters of PEFT call the decoder past the model's hooks.
    for module in (model, decoder_of(model)):
        add_hooks(module, _before_pass, _after_pass)


def _cache_of(kwargs: dict[str, Any]) -> Any:
    # The usual name first: steps are many, and other names few.
    cache = kwargs.get(CACHE_NAMES[0])
    return cache_argument(kwargs) if cache is None else cache


# The hooks themselves may stand in a graph, with other caches; recording is no part of it.
def _before_pass(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Begin a pass, and compare the model where the cache does not know it."""
    cache = _cache_of(kwargs)
    if not isinstance(cache, RetrievalCache):
        return None
    _begin(module, cache, args, kwargs)
    return args, kwargs


@not_compiled
def _begin(
    module: Any, cache: RetrievalCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    cls: Any = type(module)
    name = cache_name_of(cls)
    if kwargs.keys() & CACHE_NAMES != {name}:
        name_cache(kwargs, name)
    start, record = cache.get_seq_length(), cache.tokens
    tokens = _tokens(args, kwargs)
    is_inner = record.owner not in (None, module) and record.start == start
    if is_inner and _may_be_of(record.given, tokens):
        # A pass inside of another one, which has recorded the ids.
        return
    # Steps of one token with the same module are not compared, nor is the pass behind their drafts:
    # that would cost more than to record them.
    verifies = cache.retrieval_layers[0].round is not None
    is_step = start > 0 and tokens is not None and (tokens.shape[1] == 1 or verifies)
    if not (is_step and record.checked_owner() is module):
        last = cache.last_identity
        is_known = last is not None and newest_identity(module) is last
        if not (is_known and (is_step or call_using(cache))):
            cache.check_model(module)
        record.checked_owner = weakref.ref(module)
    record.owner, record.start, record.given = module, start, tokens
    # Ids are recorded at once: a pass that breaks off behind the last layer leaves its rows. Layers
    # refuse another number of sequences.
    kv, ids = cache.retrieval_layers[0].kv, None
    if tokens is not None and (not start or kv is None or kv.batch_size == len(tokens)):
        ids = None if tokens.is_floating_point() else tokens.to(torch.int32, copy=True)
    record.pending.append((start, ids))


def _after_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    cache = _cache_of(kwargs)
    if isinstance(cache, RetrievalCache):
        _end(module, cache, args, kwargs, out)


@not_compiled
def _end(
    module: Any, cache: RetrievalCache, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Record the other inputs of a pass, unless it failed or is a part of another."""
    record = cache.tokens
    if record.owner is not module:
        return
    record.owner = record.given = None
    start, end, tokens = record.start, cache.get_seq_length(), _tokens(args, kwargs)
    call = None if end - start == 1 else call_using(cache)
    is_point = end - start > cache.options.max_draft if call is None else end in call.points
    # A pass that verifies drafts may be dropped again.
    if output is not None and is_point and cache.retrieval_layers[0].round is None:
        foreign = foreign_layers_of(cache.layers)
        cache.snapshots.take(end, foreign, cache.options.snapshots)
    if output is None or tokens is None:
        return
    if tokens.shape[1] != end - start:
        # The model adds tokens of its own.
        record.pending.append((start, None))
        return
    if len(record.pending) > _MOST_PENDING:
        record.write_pending()
    # `generate` recorded all of them at once.
    inputs = _other_inputs(kwargs) if end - start > 1 and call is None else {}
    if inputs:
        record.passes.append(InputDigest.of(inputs, start, end, start))


def _may_be_of(given: torch.Tensor | None, tokens: torch.Tensor | None) -> bool:
    """Whether ``tokens`` may be the input of a pass inside one whose input is ``given``."""
    if given is tokens or given is None or tokens is None:
        return True
    kinds = [(one.dtype, one.device, one.ndim, len(one)) for one in (given, tokens)]
    return kinds[0] != kinds[1] or torch.equal(given, tokens)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """``[B, n]`` ids or ``[B, n, width]`` embeddings among the arguments of a model."""
    tokens = kwargs.get(EMBEDDINGS)
    if tokens is None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
    return tokens if isinstance(tokens, torch.Tensor) and tokens.ndim > 1 else None


def _other_inputs(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of real numbers among ``arguments``: pictures, sounds, embeddings."""
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
        and (value.is_floating_point() and value.numel() > 0 and name != "attention_mask")
    }


def _check_ids(cache: RetrievalCache, ids: torch.Tensor, mask: torch.Tensor) -> None:
    cache_len = cache.get_seq_length()
    difference = cache.tokens.difference(ids, mask, cache_len)
    if difference is None:
        return
    row, position, prompt_id, cache_id = difference
    raise ValueError(
        f"the prompt differs from the tokens in past_key_values: in row {row} at position "
        f"{position} it has id {prompt_id}, the cache holds {cache_id}. Pass the conversation "
        "that the cache holds and the new tokens behind it, with the attention_mask of its padding"
        f", cut the cache to what they share with cache.crop({position - cache_len}), or begin "
        "anew with cache.reset(); one made with on_divergence='crop' is cut by generate"
    )


def _check_inputs(
    model: Any, cache: RetrievalCache, inputs: Mapping[str, torch.Tensor], ids: torch.Tensor | None
) -> None:
    """Compare pictures and sounds, or the embeddings of a prompt without ids."""
    passes, cache_len = cache.tokens.passes, cache.get_seq_length()
    equal = [InputDigest.of(inputs, one.start, one.end) == one for one in passes]
    # A new picture is that of new tokens that stand for one.
    marks = torch.tensor(ids_of_pictures(model.config), device=None if ids is None else ids.device)
    is_new = ids is not None and bool(torch.isin(ids[:, cache_len:], marks).any())
    if all(equal) or is_new or (ids is not None and any(equal)):
        return
    start, end, _ = passes[equal.index(False)]
    raise ValueError(
        f"{', '.join(sorted(inputs))} is not what the tokens {start} to {end - 1} in "
        "past_key_values were filled with: pass the same, leave it out if the new tokens need "
        "none, or begin anew with cache.reset()"
    )
