"""The checks of a call of ``generate`` that a retrieval cache is to serve, in their order.

``check_shapes`` comes before all others, because transformers itself reads prompt and mask as it
prepares a call. ``check_call`` does the rest, before the first token.

A model may drop the cache that ``generate`` hands to it, or put another in its place: some do at a
certain length, some in training mode, and so may a wrapper around a model. The answer can still be
right, but nothing is retrieved, or the cache holds another text. So ``check_pass`` compares every
pass with the call, and ``check_custom`` looks at the cache behind a loop of the caller's own.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, QuantizedCache

from hf_kvret.attention.base import OUR_NAMES
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import other_batch
from hf_kvret.generate.chunks import DRAFTS, is_assisted
from hf_kvret.generate.from_shelf import SHELF, STEP
from hf_kvret.generate.lossless import lossless_obstacle
from hf_kvret.generate.provenance import check_origin
from hf_kvret.generate.requests import Request, current_request, retrieves, take_cache
from hf_kvret.methods.known import METHODS
from hf_kvret.models.compatibility import model_layers
from hf_kvret.models.versions import CACHE_NAME, cache_argument, cache_of

_NEW_CACHE = (
    "use cache_implementation='dynamic' for this model, and report it; the retrieval cache of this "
    "call can't go on: begin with a new one, or cache.reset()"
)


def check_call(
    call: Request, cache: RetrievalCache, generation_config: Any, prepared_mask: torch.Tensor | None
) -> None:
    """ValueError where ``cache`` can't serve ``call``.

    RuntimeError where a call in another thread has it.

    Args:
        call: is about to begin; it owns the cache from here on.
        cache: that it uses; it records digests of inputs that are no text.
        generation_config: the call's own copy.
        prepared_mask: the attention mask as ``generate`` prepared it; it masks padding tokens.
    """
    take_cache(call, cache)
    if reasons := why_not(call, cache, generation_config, prepared_mask):
        raise ValueError("\n".join(reasons))
    outlives = is_callers(call, cache) or generation_config.return_dict_in_generate
    check_origin(call, cache, outlives, prepared_mask)


def why_not(
    call: Request, cache: RetrievalCache, generation_config: Any, prepared_mask: torch.Tensor | None
) -> list[str]:
    """Why ``cache`` can't serve ``call``, each reason with the way out; empty where it can.

    The arguments are those of ``check_call``.
    """
    mask = call.mask(prepared_mask)
    cache_len = cache.get_seq_length() if call.keeps is None else call.keeps
    reasons = [lossless_obstacle(call, cache, generation_config), _soft_prompt_obstacle(call)]
    reasons += [_mask_fault(mask, cache_len), _misplaced_options(generation_config)]
    if is_callers(call, cache):
        reasons += [_other_layers(call, cache), _missing_tokens(call, cache_len)]
        reasons.append(_other_rows(call, cache, generation_config))
    if generation_config.use_cache is False:
        # Each pass would append the whole text.
        owner = "the cache" if is_callers(call, cache) else f"cache_implementation={cache.name!r}"
        models = "the model's generation_config says it, so pass use_cache=True"
        remedy = "drop one" if call.sets("use_cache") else models
        reasons.append(f"use_cache=False contradicts {owner}: {remedy}")
    if generation_config.output_attentions:
        reasons.append(
            "output_attentions=True: a retrieval cache never forms the attention matrix; drop the "
            "argument or use cache_implementation='dynamic'"
        )
    size = generation_config.prefill_chunk_size
    if size is not None and (not isinstance(size, int) or size < 1):
        reasons.append(
            f"prefill_chunk_size={size}: give a count of tokens above 0, or leave it out"
        )
    # transformers tells them by their names, too.
    drafter = type(call.arguments.get("assistant_model")).__name__
    if drafter.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        reasons.append(
            f"{drafter} reads keys and values of all tokens, which a retrieval cache does not hand "
            "out: take another assistant_model, prompt_lookup_num_tokens, or lossless=True"
        )
    if cache_len and is_assisted(call, generation_config):
        reasons.append(
            "assisted decoding of transformers reads the whole prompt again, also the "
            f"{cache_len} tokens that past_key_values holds: leave out assistant_model, "
            f"{', '.join(DRAFTS)} for this call, or begin anew with cache.reset()"
        )
    return [reason for reason in reasons if reason]


def is_callers(call: Request, cache: RetrievalCache) -> bool:
    """Whether the caller handed ``cache`` to ``call``, which would make one of a name else."""
    return cache_argument(call.arguments) is cache


def check_shapes(call: Request, past_len: int) -> None:
    """Refuse a prompt without tokens, and a mask of another shape. Reads no values.

    Args:
        call: its mask is ``[B, n]`` or ``[B, past_len + n]``, or None: all are tokens.
        past_len: tokens that the cache holds.

    Raises:
        TypeError: a mask that is no tensor.
        ValueError: no rows, no tokens, or another shape.
    """
    prompt, mask = call.token_prompt(), call.arguments.get("attention_mask")
    if prompt is not None and 0 in prompt.shape[:2]:
        raise ValueError(
            f"the prompt is of shape {list(prompt.shape)} and has no token: give each row at least "
            "one (tokenizer.bos_token_id), and at least one row"
        )
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}: pass a tensor (tokenizer(..., "
            "return_tensors='pt'))"
        )
    shape = list(mask.shape)
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask is of shape {shape}: custom 4D masks and others are not supported; "
            "pass one of two dimensions, with a row for each row of the prompt and a column for "
            "every token"
        )
    if prompt is None:
        return
    rows, new_len = prompt.shape[:2]
    if shape not in ([rows, new_len], [rows, past_len + new_len]):
        raise ValueError(
            f"attention_mask is of shape {shape}, the prompt has {rows} rows of {new_len} tokens: "
            "pass one column for every token, past and new, and one row for each row"
        )


def check_one_cache(cache: Any, name: str | None) -> None:
    """ValueError where ``cache`` is given beside the ``name`` of another one of ours."""
    is_ours = isinstance(cache, RetrievalCache)
    if cache is not None and (name not in (None, cache.name) if is_ours else name in METHODS):
        raise ValueError(
            f"the cache is a {type(cache).__name__}, cache_implementation={name!r} asks for "
            "another cache: pass one of the two"
        )


def check_options_are_read(call: Request, generation_config: Any, cache: Any) -> None:
    """ValueError for a ``cache_config`` of this ``call`` that no cache of ours reads."""
    options, name = generation_config.cache_config, generation_config.cache_implementation
    # The model's own is a default for calls that name a cache_implementation. What transformers'
    # caches don't read either is theirs to say, but for options of ours.
    theirs = signature(QuantizedCache).parameters.keys() if name == "quantized" else set()
    if not options or not call.sets("cache_config") or (name and not _options_in(options) - theirs):
        return
    reason = "no cache was asked for" if cache is None else f"the cache is a {type(cache).__name__}"
    reason = f"{name!r} is a cache of transformers" if name else reason
    raise ValueError(
        f"cache_config={options!r}, but {reason}, so nothing would read it: leave it out, or name "
        f"the cache that it is for with cache_implementation, one of {', '.join(METHODS)}"
    )


def _options_in(values: Any) -> set[str]:
    """The names in a dict that only a cache of ours reads; a seed may be that of anything."""
    options = {field.name for method in METHODS.values() for field in fields(method.Config)}
    names = {*options, SHELF, STEP, "preset"} - {"seed"}
    return names & values.keys() if isinstance(values, dict) else set()


def _misplaced_options(generation_config: Any) -> str:
    """Says which options stand in the generation config itself, which takes any; else empty."""
    given = {name: value for name, value in vars(generation_config).items() if value is not None}
    names = _options_in(given) - vars(GenerationConfig()).keys()
    if not names:
        return ""
    return (
        f"the generation config has {', '.join(sorted(names))}, which only the cache would read: "
        "move them into its cache_config, or model.generation_config's; set others' keys to None"
    )


def _soft_prompt_obstacle(call: Request) -> str:
    """Says that PEFT would add virtual tokens, which no cache of ours has once and for good."""
    # While a call runs, PEFT puts its own function in place of the model's.
    owner = getattr(vars(call.model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(owner, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return ""
    return (
        f"the model has a soft prompt of PEFT ({config.peft_type.value}), whose virtual tokens "
        "stand in a cache of their own, or before every new token: take another kind of adapter, "
        "as LoRA, or turn this one off (model.disable_adapter())"
    )


def _other_layers(call: Request, cache: RetrievalCache) -> str:
    """Says that the cache was made for a model with another number of layers; else empty."""
    count, model_count = len(cache.layers), len(model_layers(call.model.config))
    if count == model_count:
        return ""
    return (
        f"past_key_values was made for a model of {count} layers, {type(call.model).__name__} "
        f"has {model_count}: make it with config=model.config"
    )


def _other_rows(call: Request, cache: RetrievalCache, generation_config: Any) -> str:
    """Says that the cache holds another number of sequences than the call has; else empty."""
    prompt, kv = call.token_prompt(), cache.retrieval_layers[0].kv
    if kv is None or prompt is None or not cache.get_seq_length():
        return ""
    counts = generation_config.num_beams or 1, generation_config.num_return_sequences or 1
    return other_batch(kv.batch_size, len(prompt) * max(counts))


def _missing_tokens(call: Request, cache_len: int) -> str:
    """Says that the prompt does not continue the ``cache_len`` tokens of the cache; else empty.

    A prompt of the new tokens alone is accepted if it has positions, and a mask of all tokens.
    """
    name, prompt = call.prompt()
    length = 0 if prompt is None else prompt.shape[1] if prompt.ndim > 1 else len(prompt)
    tensors = (call.arguments.get(name) for name in ("attention_mask", "position_ids"))
    widths = [x.shape[-1] if isinstance(x, torch.Tensor) and x.ndim else None for x in tensors]
    has_positions = widths == [cache_len + length, length]
    if not cache_len or length > cache_len or has_positions:
        return ""
    return (
        f"{name} has {length} tokens, past_key_values holds {cache_len}: pass the whole "
        "conversation, the tokens that the cache holds and the new ones behind them (or "
        "cache.crop to forget the newest, cache.reset() to begin anew)"
    )


def _mask_fault(mask: torch.Tensor | None, cache_len: int) -> str:
    """Says which row of ``mask [B, m]`` new tokens can't follow; empty if they can.

    Padding on the left and holes in the middle of a row are as good as none. ``cache_len``: how
    many of the m columns are of tokens that the cache holds.
    """
    if mask is None:
        return ""
    if mask.is_floating_point() and not bool((mask >= 0).all()):
        return (
            "attention_mask has negative numbers or NaN, as one that is added to scores: pass 1 "
            "for tokens and 0 for padding"
        )
    valid = mask != 0
    ends = valid[:, -1]
    if bool(ends.all()):
        return ""
    remedy = "give it at least a token (tokenizer.bos_token_id), or leave the row out of the batch"
    empty = (~valid.any(dim=1)).nonzero()
    if len(empty):
        return f"row {int(empty[0])} of the prompt has no token, only padding: {remedy}"
    row = int((~ends).nonzero()[0])
    if cache_len and not bool(valid[row, cache_len:].any()):
        return f"row {row} of the prompt has no token behind those that the cache holds: {remedy}"
    return (
        f"the prompt is padded on the right in row {row}: new tokens would follow padding. Pad on "
        "the left (tokenizer.padding_side = 'left')"
    )


def keep_cache(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Give back a cache that a model drops as it prepares a pass, empty, to read the text anew.

    Phi-3 does so where the text outgrows the short factors of its RoPE. transformers' own cache
    would be a new one there. Nothing happens where the text is not at hand, as after a prompt of
    embeddings: then ``check_pass`` raises. ``arguments``, the keywords of
    ``prepare_inputs_for_generation``, are changed in place; ``input_ids`` are the text so far.
    """
    call = current_request(model)
    call.keep_prompt()
    call.text_len = input_ids.shape[1]
    cache = call.cache
    if cache is not None and call.steps is None:
        call.pass_start = cache.get_seq_length()
    if cache is None or cache_argument(arguments) is not None:
        return
    if call.steps is not None:
        call.steps.close()
    if cache.get_seq_length():
        if input_ids.shape[1] <= cache.get_seq_length():
            return
        cache.reset()
        cache.check_model(call.model)
        cache.expect(input_ids.shape[1], input_ids.shape[1])
        arguments["next_sequence_length"] = None
    arguments[CACHE_NAME] = cache


def check_pass(model: Any, output: Any) -> None:
    """ValueError where a pass of ``generate`` used another cache than that of the call, or none."""
    call = current_request(model)
    if call.cache is None:
        return
    cache = cache_of(output)
    if cache is not None and cache is not call.cache:
        raise ValueError(
            f"{type(model).__name__} ran a forward pass without the cache of this call: its output "
            f"has a {type(cache).__name__}. It drops the cache in prepare_inputs_for_generation or "
            f"in its forward: {_NEW_CACHE}"
        )
    if call.cache.get_seq_length() <= call.pass_start:
        raise ValueError(
            f"{type(model).__name__} added no token to the cache of this call in a forward pass: "
            "its layers don't get the cache, as with gradient checkpointing in training mode. Call "
            f"model.eval() and model.gradient_checkpointing_disable(), or {_NEW_CACHE}"
        )


def check_custom(call: Request, past_len: int) -> None:
    """ValueError where a ``custom_generate`` never used the cache of ``call``.

    One from a folder or from the hub runs in place of transformers' own, before any cache is made.
    ``past_len``: tokens in the caller's cache before, if there was one.
    """
    cache = call.cache or cache_argument(call.arguments)
    grew = cache is not None and cache.get_seq_length() > past_len
    if not grew and not call.is_delegated:
        raise ValueError(
            f"custom_generate={call.arguments['custom_generate']!r} ran without the retrieval "
            "cache: it must hand on the cache, or cache_implementation, to the model's generate; "
            "leave custom_generate out, or use cache_implementation='dynamic'"
        )


def refuse_batch(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """ValueError for continuous batching, which has a paged cache of its own and can't use ours."""
    call = Request(model, arguments)
    text = model.config.get_text_config(decoder=True)
    options = (arguments.get("cache_config"), call.configured("cache_config"))
    is_ours = retrieves(call) or text._attn_implementation in OUR_NAMES
    if is_ours or any(map(_options_in, options)):
        raise ValueError(
            "continuous batching by init_continuous_batching or generate_batch keeps a paged cache "
            "of its own, which retrieval does not serve: call hf_kvret.restore(model) first and "
            "leave out the cache, its name and cache_config, or use generate (of transformers "
            "serve: leave out --continuous-batching)"
        )
