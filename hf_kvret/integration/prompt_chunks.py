"""Long prompts in chunks: when, and of what size.

A forward pass holds some ten times the hidden states of all its tokens, beside the rows that the
cache keeps. In chunks it holds those of one chunk. ``generate`` splits a prompt by itself where its
generation config has ``prefill_chunk_size``; here is what sets it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.core.sizes import free_bytes

_log = logging.getLogger(__name__)

# What a chunk may take beside its rows, and a whole prompt where free memory is not known.
CHUNK_BYTES = 2 << 30
WHOLE_BYTES = 8 << 30
# Of the free device memory, for one pass: the rows of the prompt need room, too.
_FREE_SHARE = 4
# Shrinking a chunk in whole pages keeps what follows aligned to them.
_STEP = 64

# What a chunk is given of, cut to its tokens. With anything else, a call goes in one pass.
_PLAIN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
# From here on transformers counts what a cache holds already, and cuts positions of any form.
_COUNTS_PAST = (5, 21)
_MARK = "_hf_kvret_chunk"

# What has this call draft tokens.
_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
# Sizes given by a caller, with max_draft, that were warned of.
_warned: set[tuple[int, int]] = set()

# How configurations call the experts that a token is sent to, and the width of an MLP.
_EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_num_experts_per_tok",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
_OTHER_INNER_SIZES = ("ffn_hidden_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner")
# Of a model that doesn't say.
_HIDDEN, _HEAD_DIM = 4096, 128


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """About how many bytes a pass holds at its peak for each of its tokens, rows not counted.

    Four hidden states (the residual, its norm, and in and out of a layer's part); gate, up and
    their product in the widest MLP that a token goes through, with experts all that it is sent to;
    queries, keys and values before and after RoPE; and three outputs of attention in fp32, which
    is what merging two parts takes. Logits are of the last token alone.
    """
    text = config.get_text_config(decoder=True)
    hidden = _most(text, "hidden_size", "n_embd", "d_model") or _HIDDEN
    heads = _most(text, "num_attention_heads", "n_head") or max(1, hidden // _HEAD_DIM)
    kv_heads = _most(text, "num_key_value_heads") or heads
    experts = _most(text, *_EXPERTS_OF_A_TOKEN) or 1
    inner = _most(text, "intermediate_size", *_OTHER_INNER_SIZES)
    expert = _most(text, "moe_intermediate_size")
    shared = _most(text, "shared_expert_intermediate_size")
    inner = max(inner, expert * experts + shared) if expert else (inner or 4 * hidden) * experts
    dim = _most(text, "head_dim") or -(-hidden // heads)
    numbers = (3 + experts) * hidden + 3 * inner + 2 * (heads + 2 * kv_heads) * dim
    return numbers * dtype.itemsize + 3 * heads * dim * 4


def _most(config: PreTrainedConfig, *names: str) -> int:
    """The largest count that any of ``names`` says, of all layers where it lists them; else 0."""
    found = [getattr(config, name, None) for name in names]
    told = [one for some in found for one in (some if isinstance(some, list | tuple) else [some])]
    return max((one for one in told if isinstance(one, int) and one > 0), default=0)


def auto_chunk(token_bytes: int, batch: int, length: int, free_bytes: int | None) -> int | None:
    """Tokens of a chunk for ``batch`` prompts of ``length``; None: in one pass.

    One pass, if all tokens together take at most a quarter of ``free_bytes`` of device memory, or
    8 GiB where that is None, and in any case if they take at most 2 GiB. Otherwise the largest
    power of two whose tokens take at most 2 GiB, but 256 at least.

    Args:
        token_bytes: of a token, as the function ``token_bytes`` says.
        batch: rows of the batch.
        length: new tokens of each row.
        free_bytes: of the device, or None.
    """
    affordable = WHOLE_BYTES if free_bytes is None else free_bytes // _FREE_SHARE
    if token_bytes * batch * length <= max(affordable, CHUNK_BYTES):
        return None
    fitting = max(1, CHUNK_BYTES // (token_bytes * batch))
    return max(256, 1 << (fitting.bit_length() - 1))


def fit_chunk(length: int, chunk: int, max_draft: int) -> int | None:
    """The size near ``chunk`` that cuts ``length`` tokens into pieces of more than ``max_draft``.

    Pieces of up to ``max_draft`` tokens would retrieve instead of attending to everything, and a
    prompt is cut into pieces of one size and what is left over. So the size is made smaller, by
    64 tokens at a time if that is enough, until the rest is long enough or nothing; where no
    smaller one will do, larger, and always above ``max_draft``. None: in one pass.
    """
    if length <= chunk:
        return None
    tried = (
        *range(chunk, max_draft, -_STEP),
        *range(chunk, max_draft, -1),
        *range(max(chunk, max_draft) + 1, length),
    )
    for size in tried:
        if length % size == 0 or length % size > max_draft:
            return size
    return None


def prompt_chunk(
    options: RetrievalConfig, model: PreTrainedModel, batch: int, length: int
) -> int | None:
    """Tokens of a pass for ``length`` new tokens of ``batch`` rows, as ``options`` ask.

    None: in one pass. ``"auto"`` looks at the memory that is free now.
    """
    chosen = options.prefill_chunk
    if chosen == "auto":
        needed = token_bytes(model.config, model.dtype)
        chosen = auto_chunk(needed, batch, length, free_bytes(model.device))
    return None if chosen is None else fit_chunk(length, chosen, options.max_draft)


def chunk_prompt(
    model: PreTrainedModel,
    cache: RetrievalCache,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """Have this call of ``generate`` read its prompt in chunks, where ``cache`` asks for them.

    Sets ``prefill_chunk_size`` of ``generation_config``, which is the call's own copy, unless the
    caller set it, and tells the cache how long chunks will be. A prompt goes in one pass as ever
    where transformers can't cut it: embeddings, images and other inputs beside token ids, positions
    of new tokens alone, hidden states as a result, assisted decoding, and, with transformers before
    5.21, behind tokens that the cache holds already. ``"auto"`` cuts nothing for models with
    recurrent or convolutional layers, not all of which go on from their state. A size of the
    caller's whose chunks would retrieve is used, with a warning.
    """
    size, given = None, generation_config.prefill_chunk_size
    length, batch = _new_tokens(cache, generation_config, model_kwargs)
    if _drafts(generation_config):
        given = None
    elif given is not None:
        _check_given(given, length, cache.options.max_draft)
    elif length and _cuttable(cache, generation_config, model_kwargs, length):
        size = prompt_chunk(cache.options, model, batch, length)
        generation_config.prefill_chunk_size = size
        setattr(generation_config, _MARK, size)
    cache.expect(length, size or given or length)


def _drafts(generation_config: Any) -> bool:
    """Whether this call decodes with drafts of its own, which reads a prompt in one pass."""
    told = (getattr(generation_config, name, None) for name in _DRAFTS)
    return any(one is not None and one is not False for one in told)


def _check_given(chunk: int, length: int, max_draft: int) -> None:
    """Warn, once, of a ``chunk`` that leaves pieces of a prompt so short that they retrieve."""
    retrieve = length > chunk and (chunk <= max_draft or 0 < length % chunk <= max_draft)
    if not retrieve or (chunk, max_draft) in _warned:
        return
    _warned.add((chunk, max_draft))
    better = fit_chunk(length, chunk, max_draft)
    _log.warning(
        "prefill_chunk_size=%d cuts a prompt of %d tokens into pieces of which some have no more "
        "than max_draft=%d: these retrieve, as drafted tokens do, instead of attending to "
        "everything. Take %s, or leave it out and let the cache's prefill_chunk choose",
        chunk,
        length,
        max_draft,
        "None" if better is None else f"prefill_chunk_size={better}",
    )


def _new_tokens(
    cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any]
) -> tuple[int, int]:
    """How many of them each row has, and how many rows there are; 0 tokens where nothing tells."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    like = positions if mask is None else mask
    if like is None:
        return 0, 0
    # Where nothing is padded transformers drops the mask, and notes how long it was.
    noted = None if mask is not None else getattr(generation_config, "_mask_length", None)
    return max(0, (noted or like.shape[-1]) - cache.get_seq_length()), like.shape[-2]


def _cuttable(
    cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any], length: int
) -> bool:
    """Whether transformers can cut the prompt of this call, of ``length`` tokens, and should."""
    chosen, positions = cache.options.prefill_chunk, model_kwargs.get("position_ids")
    if chosen is None or (chosen == "auto" and _recurs(cache)):
        return False
    if generation_config.output_hidden_states or _more_than_tokens(model_kwargs):
        return False
    past = cache.get_seq_length()
    if positions is not None and positions.shape[-1] != past + length:
        # Chunks are given positions counted from the first token held.
        return False
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if release >= _COUNTS_PAST:
        return True
    return not past and (positions is None or positions.ndim == 2)


def forget_chunk(generation_config: Any) -> None:
    """Take back what ``chunk_prompt`` set, from the copy of it that a draft model is handed."""
    if getattr(generation_config, _MARK, None) is not None:
        generation_config.prefill_chunk_size = None


def _recurs(cache: RetrievalCache) -> bool:
    """Whether any layer holds something else than keys and values."""
    held = (RetrievalLayer, DynamicLayer)
    return any(isinstance(x, LinearAttentionLayer) or not isinstance(x, held) for x in cache.layers)


def _more_than_tokens(model_kwargs: dict[str, Any]) -> bool:
    """Whether the model is given anything that a chunk can't be given its part of."""
    for name, value in model_kwargs.items():
        if name not in _PLAIN and (isinstance(value, torch.Tensor) or value):
            return True
    return False
