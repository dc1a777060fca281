"""Long prompts in chunks: when, and of what size.

A forward pass holds some ten times the hidden states of all its tokens, beside the rows that the
cache keeps. In chunks it holds those of one chunk. ``generate`` splits a prompt by itself where its
generation config has ``prefill_chunk_size``; here is what sets it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.compatibility import head_dim
from hf_kvret.config import RetrievalConfig
from hf_kvret.layer import RetrievalLayer

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


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """About how many bytes a pass holds at its peak for each of its tokens, rows not counted.

    Four hidden states (the residual, its norm, and in and out of a layer's part); gate, up and
    their product in the widest MLP that a token goes through, with experts all that it is sent to;
    queries, keys and values before and after RoPE; and three outputs of attention in fp32, which
    is what merging two parts takes. Logits are of the last token alone.
    """
    text = config.get_text_config(decoder=True)
    hidden, heads = text.hidden_size, text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else inner
    expert = getattr(text, "moe_intermediate_size", None)
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    inner = inner * experts if expert is None else max(inner, expert * experts + shared)
    dim = head_dim(config)
    numbers = (3 + experts) * hidden + 3 * inner + 2 * (heads + 2 * kv_heads) * dim
    return numbers * dtype.itemsize + 3 * heads * dim * 4


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
    smaller one will do, larger. None: in one pass.
    """
    if length <= chunk:
        return None
    tried = (
        *range(chunk, max_draft, -_STEP),
        *range(chunk, max_draft, -1),
        *range(chunk + 1, length),
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
    caller set it, and tells the cache how many chunks there will be. A prompt goes in one pass as
    ever where transformers can't cut it: embeddings, images and other inputs beside token ids,
    hidden states as a result, and, with transformers before 5.21, behind tokens that the cache
    holds already. ``"auto"`` cuts nothing for models with recurrent or convolutional layers, not
    all of which go on from their state.
    """
    size, given = None, generation_config.prefill_chunk_size
    length, batch = _new_tokens(cache, generation_config, model_kwargs)
    if given is None and length and _cuttable(cache, generation_config, model_kwargs):
        size = prompt_chunk(cache.options, model, batch, length)
        generation_config.prefill_chunk_size = size
        setattr(generation_config, _MARK, size)
    cache.expect(length, max(1, -(-length // (size or given or max(1, length)))))


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


def _cuttable(cache: RetrievalCache, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether transformers can cut the prompt of this call, and should."""
    chosen, positions = cache.options.prefill_chunk, model_kwargs.get("position_ids")
    if chosen is None or (chosen == "auto" and _recurs(cache)):
        return False
    if generation_config.output_hidden_states or _more_than_tokens(model_kwargs):
        return False
    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if release >= _COUNTS_PAST:
        return True
    return not cache.get_seq_length() and (positions is None or positions.ndim == 2)


def forget_chunk(generation_config: Any) -> None:
    """Take back what ``chunk_prompt`` set, from the copy of it that a draft model is handed."""
    if getattr(generation_config, _MARK, None) is not None:
        generation_config.prefill_chunk_size = None


def free_bytes(device: torch.device) -> int | None:
    """Device memory that torch can still give out, its own cache included; None: not a GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
