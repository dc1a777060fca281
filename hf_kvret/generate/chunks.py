"""Long prompts in chunks: when, and of what size.

At its peak a forward pass takes some thirty times the memory of its tokens' hidden states, beside
the rows that the cache keeps. In chunks it takes that for one chunk only. ``generate`` splits a
prompt if its generation config has ``prefill_chunk_size``; this module sets it.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.requests import Request
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.snapshots import are_taken
from hf_kvret.models.exact_chunks import Span, depends_on_length, why_whole
from hf_kvret.models.versions import CACHE_NAMES, CHUNKS_COUNT_PAST, CUTS_TOKEN_TYPES, DummyLayer
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.shelf.entry import BLOCK

_log = logging.getLogger(__name__)

LEAST_NEW_TOKENS = 4096
"""New tokens that are expected of any text, where its limit allows them."""

CHUNK_BYTES = 2 << 30
"""Most memory that a pass of ``prefill_chunk="auto"`` takes beside its rows."""
_LEAST_CHUNK = 256
# Chunks shrink by whole pages, so that later tokens stay aligned to pages.
_STEP = 64

# Arguments that can be cut to the tokens of a chunk. With any other, a call goes in one pass.
_PLAIN = {"attention_mask", "position_ids", *CACHE_NAMES, "use_cache", "logits_to_keep"}

# Processors of models that see give these with every prompt: zeros where it is text alone.
_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}

DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options that make a call draft tokens."""

# Hidden states, MLP and attention of a token, in hidden states: 23 in Llama 3.1 8B, 37 in a Qwen3
# of 30B with experts. Multi-head latent attention takes up to twice as much.
_HIDDEN_STATES = 32
# A configuration that names no hidden size is taken to have this one.
_HIDDEN_SIZE = 4096


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Rough peak memory of a forward pass in bytes per token, rows not counted."""
    hidden_size = getattr(config.get_text_config(decoder=True), "hidden_size", _HIDDEN_SIZE)
    return _HIDDEN_STATES * hidden_size * dtype.itemsize


def auto_chunk(token_bytes: int, batch: int) -> int:
    """Tokens of a chunk for ``batch`` prompts: the largest power of two that takes at most 2 GiB.

    But 256 at least. ``token_bytes``: peak bytes per token, from the function of that name.
    """
    tokens = max(1, CHUNK_BYTES // (token_bytes * batch))
    return max(_LEAST_CHUNK, 1 << (tokens.bit_length() - 1))


def fit_chunk(length: int, chunk: int, max_draft: int) -> int | None:
    """The size near ``chunk`` that cuts ``length`` tokens into chunks of more than ``max_draft``.

    Chunks of up to ``max_draft`` tokens would retrieve instead of attending to everything, and the
    last chunk of a prompt is shorter than the others. So the size is reduced, in steps of 64
    tokens if one of these works, until the last chunk is long enough or empty. If no smaller size
    works it is increased. It is always above ``max_draft``. None: in one pass.
    """
    if length <= chunk:
        return None
    sizes = (
        *range(chunk, max_draft, -_STEP),
        *range(chunk, max_draft, -1),
        *range(max(chunk, max_draft) + 1, length),
    )
    fitting = (size for size in sizes if length % size == 0 or length % size > max_draft)
    return next(fitting, None)


def prompt_chunk(
    options: RetrievalConfig, model: PreTrainedModel, batch: int, length: int
) -> int | None:
    """Chunk size by ``options`` for ``length`` new tokens of ``batch`` rows; None: in one pass."""
    chunk = options.prefill_chunk
    if chunk == "auto":
        chunk = auto_chunk(token_bytes(model.config, model.dtype), batch)
    return None if chunk is None else fit_chunk(length, chunk, options.max_draft)


def chunk_prompt(
    call: Request, cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    """Make ``call`` read its prompt in chunks, if it or the options of ``cache`` ask so.

    Sets ``prefill_chunk_size`` of ``generation_config``, the call's own copy, and tells the cache
    how long chunks will be. A prompt goes in one pass where transformers can't cut it: embeddings,
    images and other inputs beside token ids, positions of new tokens alone, hidden states as a
    result, assisted decoding, and, with transformers before 5.21, after tokens that are already
    cached. So it does where chunks would give something else than one pass, see ``why_whole``.
    ``"auto"`` never cuts for models with recurrent or convolutional layers, as some of them don't
    continue from their state. Where layers can't go back, chunks end where snapshots are taken.

    Raises:
        ValueError: the caller's ``prefill_chunk_size`` cuts a prompt of a model that ``why_whole``
            names.
    """
    model, size = call.model, None
    option, callers = cache.options.prefill_chunk, generation_config.prefill_chunk_size
    length, batch = _new_tokens(cache, generation_config, model_kwargs)
    obstacle = _obstacle(cache, generation_config, model_kwargs, length)
    if length and not is_assisted(call, generation_config):
        most = cache.options.max_draft
        if callers is None:
            size = prompt_chunk(cache.options, model, batch, length)
        elif callers > most and not cache.options.follows_model:
            size = fit_chunk(length, callers, most)
        elif callers < length:
            size = callers
            # The model's own indexer selects the same whatever the chunks are.
            if not (cache.options.follows_model or obstacle):
                message = (
                    "prefill_chunk_size=%d cuts the prompt into chunks of at most max_draft=%d "
                    "tokens, which retrieve as drafted ones do: take more, or leave it out"
                )
                _log.warning(message, callers, most)
        reason = None if size is None else _why_whole(model, cache, model_kwargs, length, size)
        if size is not None and obstacle:
            reason = obstacle
        elif reason is not None and callers is not None:
            raise ValueError(
                f"prefill_chunk_size={callers} cuts a prompt of {length} tokens, and this "
                f"model has to read it in one pass: {reason}. Pass prefill_chunk_size=None, or "
                "leave it out of the call and of the model's generation_config"
            )
        elif size is not None and callers is None and option == "auto" and recurs(cache):
            reason = "'auto' leaves models with recurrent layers whole"
        if reason is not None:
            name = "prefill_chunk" if callers is None else "prefill_chunk_size"
            given = option if callers is None else callers
            size, level = None, logging.INFO if given == "auto" else logging.WARNING
            _log.log(level, "%s=%r: the prompt goes in one pass, as %s", name, given, reason)
        generation_config.prefill_chunk_size = size
    chunk = size or length
    past = cache.get_seq_length()
    is_cut = are_taken(cache.layers, cache.options.snapshots)
    if length and is_cut and not is_assisted(call, generation_config):
        whole = obstacle or cache.options.follows_model
        sizes = [chunk] if whole else _sizes(length, chunk, cache)
        if len(sizes) > 1 and not _why_whole(model, cache, model_kwargs, length, sizes[0]):
            generation_config.prefill_chunk_size, chunk = sizes, max(sizes)
        call.points = frozenset(past + end for end in (*accumulate(sizes), length))
    new_tokens = expected_new_tokens(generation_config, past + length)
    cache.expect(length, chunk, new_tokens)


def _sizes(length: int, chunk: int, cache: RetrievalCache) -> list[int]:
    """Sizes of chunks of ``length`` new tokens, which end where snapshots are to be taken.

    The last one is as short as it can be and be exact: the next turn may differ from there on. In a
    prompt that hardly has a block it is the last token, where nothing is cold yet.
    """
    options, past = cache.options, cache.get_seq_length()
    end = options.max_draft + 1
    body = length - end
    if body < end or past + body < BLOCK:
        is_dense = length < max(options.dense_len, options.recent + options.flush)
        return [length - 1, 1] if not past and length > BLOCK and is_dense else [length]
    size = fit_chunk(body, min(chunk, options.snapshot_every), options.max_draft)
    starts = range(0, body, size or body)
    return [*(min(size or body, body - start) for start in starts), end]


def _why_whole(
    model: PreTrainedModel,
    cache: RetrievalCache,
    model_kwargs: dict[str, Any],
    length: int,
    chunk: int,
) -> str | None:
    """Why chunks of this prompt would not give what one pass gives; None if they would.

    Waits for a GPU where that depends on positions.
    """
    if not depends_on_length(model.config):
        return why_whole(model.config, None)
    past_len, positions = cache.get_seq_length(), model_kwargs.get("position_ids")
    # A model without positions may count them by its mask: in padded rows they are smaller then, so
    # nothing is known of the first chunk's.
    span = Span(past_len, 0, past_len + length)
    if positions is not None:
        new = positions[..., -length:]
        span = Span(past_len, int(new[..., :chunk].max()) + 1, int(new.max()) + 1)
    return why_whole(model.config, span)


def is_assisted(call: Request, generation_config: Any) -> bool:
    """Whether ``call`` uses assisted decoding, which reads a prompt in one pass."""
    settings = (getattr(generation_config, name, None) for name in DRAFTS)
    is_set = any(one is not None and one is not False for one in settings)
    return is_set or call.arguments.get("assistant_model") is not None


def _new_tokens(
    cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any]
) -> tuple[int, int]:
    """``(new tokens of each row, rows)``; 0 tokens where the arguments don't say."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    like = positions if mask is None else mask
    if like is None:
        return 0, 0
    # Without padding transformers drops the mask, and keeps its length.
    mask_len = None if mask is not None else getattr(generation_config, "_mask_length", None)
    return max(0, (mask_len or like.shape[-1]) - cache.get_seq_length()), like.shape[-2]


def _obstacle(
    cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any], length: int
) -> str | None:
    """What keeps the prompt of this call, ``length`` tokens, from being cut; None if nothing."""
    if generation_config.output_hidden_states:
        return "output_hidden_states asks for those of the whole prompt"
    for name, value in model_kwargs.items():
        is_text = CUTS_TOKEN_TYPES and name in _TOKEN_TYPES and not bool(value.any())
        if name not in _PLAIN and not is_text and (isinstance(value, torch.Tensor) or value):
            return f"{name} can't be cut"
    past, positions = cache.get_seq_length(), model_kwargs.get("position_ids")
    if positions is not None and positions.shape[-1] != past + length:
        # transformers cuts positions that count from the first cached token.
        return "position_ids are those of the new tokens alone"
    if not CHUNKS_COUNT_PAST and (past or (positions is not None and positions.ndim != 2)):
        return "transformers before 5.21 can't cut it behind cached tokens, nor positions of parts"
    return None


def recurs(cache: Cache) -> bool:
    """Whether any layer has state other than keys and values."""
    plain = RetrievalLayer, DynamicLayer, DummyLayer
    linear = LinearAttentionCacheLayerMixin
    return any(isinstance(x, linear) or not isinstance(x, plain) for x in cache.layers)


def expected_new_tokens(generation_config: Any, context_len: int) -> int:
    """New tokens after ``context_len`` tokens, those of the cache and those of the prompt.

    ``max_new_tokens`` is often a limit that is never reached, and memory that is kept free for it
    would take away from what is sure. So as many as there are then, but ``LEAST_NEW_TOKENS`` at
    least; never more than the limit of ``generation_config``.
    """
    limit = generation_config.max_new_tokens
    if limit is None:
        limit = (generation_config.max_length or 0) - context_len
    return max(0, min(limit, max(context_len, LEAST_NEW_TOKENS)))
