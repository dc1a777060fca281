"""Questions to a document that a cache has read."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.cache import RetrievalCache
from hf_kvret.models.versions import CACHE_NAMES
from hf_kvret_model_patches.decoders import decoder_of

_log = logging.getLogger(__name__)

_PLACE = "PUT THE PROMPT HERE"
# What a model's author may ask of one answer of one beam, whatever cache it has.
_OF_AN_ANSWER = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("renormalize_logits", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config"),
    *("max_time", "max_new_tokens", "disable_compile", "transformers_version"),
    # A lossless cache drafts by these, and by its times where nobody set them.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
}


def plain_generation_config(model: PreTrainedModel) -> tuple[GenerationConfig, list[str]]:
    """A copy of the defaults of ``model`` for one answer with a cache of ours, and what it lacks.

    Its author may have set another cache, beams, other drafts or outputs, which contradict it.
    The names of these are the second result; in the copy they are as if nobody had set them. A
    ``max_length`` goes without being named, as every command has its own limit.
    """
    own, config = model.generation_config, GenerationConfig()
    # What transformers takes where nobody says anything; None for all others.
    usual, dropped = config._get_default_generation_params(), []
    for name in vars(config):
        value, neutral = getattr(own, name, None), usual.get(name)
        if name in _OF_AN_ANSWER or name.startswith("_"):
            setattr(config, name, value)
            continue
        setattr(config, name, None if name == "max_length" else neutral)
        if value not in (None, neutral) and (value or neutral) and name != "max_length":
            dropped.append(name)
    return config, dropped


def document_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """``[1, T]`` token ids of a document as `ask` expects it in a cache.

    It begins the user's message where the tokenizer has a chat template, else the whole text.
    Blanks at either end are left out where the template strips them from a message.
    Names of control tokens in it, as ``<|im_end|>``, are read as text.

    Raises:
        ValueError: a chat template that can't be used, see `around_message`.
    """
    words = text.strip() or text
    lead, trail = text.split(words, 1) if text else ("", "")
    before, after = around_message(tokenizer, lead, trail)
    words += after.removesuffix(around_message(tokenizer)[1])
    bos = tokenizer.bos_token_id
    begins = tokenizer("", verbose=False)["input_ids"][:1]
    if tokenizer.chat_template:
        begins = _encode(tokenizer, _shown(tokenizer, _PLACE))[:1]
    # Where neither the tokenizer nor its template begins with one, generate's users have none.
    first = [bos] if bos is not None and begins == [bos] else []
    return torch.tensor([[*first, *_message(tokenizer, words, before=before)]], dtype=torch.long)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: RetrievalCache,
    question: str,
    **options: Any,
) -> str:
    """The answer to a question about the document in ``cache``, which stays as it is.

        ids = hf_kvret.document_ids(tokenizer, text)
        model.generate(ids, past_key_values=cache, max_new_tokens=1)
        cache.crop(ids.shape[1] - cache.get_seq_length())
        hf_kvret.ask(model, tokenizer, cache, "Who is the author?")

    Args:
        model: that filled the cache.
        tokenizer: of the model.
        cache: that holds `document_ids`, and nothing behind them.
        question: asked behind the document, in the same message where there is a chat template.
        **options: of ``generate``, as ``streamer``; 512 new tokens at most, unless they or a
            ``generation_config`` name a length, and greedy, unless one is given. One answer of one
            beam.

    Raises:
        TypeError: another cache.
        ValueError: an empty question, a cache without the ids of one sequence, several beams or
            answers, another cache among the options, a chat template that can't be used, more
            tokens than the model has learned positions.
    """
    if not isinstance(cache, RetrievalCache):
        raise TypeError(
            f"cache is a {type(cache).__name__}: pass one of hf_kvret, as hf_kvret.ParisKVCache"
        )
    ids = cache.input_ids
    if ids is None or len(ids) != 1:
        raise ValueError(
            "the cache doesn't hold one document whose tokens it saw: read hf_kvret.document_ids("
            "tokenizer, text) into it"
        )
    if not question.strip():
        raise ValueError("there is no question: write one")
    words = question.rstrip()
    _, after = around_message(tokenizer, trail=question.removeprefix(words))
    behind = torch.tensor([_message(tokenizer, f"\n\n{words}", after=after or "\n")])
    prompt = torch.cat([ids.cpu(), behind], dim=1).to(model.device)
    most, is_table = positions(model)
    if is_table and prompt.shape[1] > most:
        raise ValueError(
            f"document and question have {prompt.shape[1]:,} tokens, and the model has {most:,} "
            "positions (max_position_embeddings): ask about a part of the document"
        )
    # A fork serves layers that can't go back, too.
    usual = {"past_key_values": cache.fork(), "max_new_tokens": 512, "do_sample": False}
    options = answer_options(model, tokenizer, prompt, options, usual)
    generate: Any = model.generate
    if is_table and options.get("max_new_tokens"):
        # The last one of an answer takes no position.
        room = most - prompt.shape[1] + 1
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
    result = generate(prompt, **options)
    tokens = getattr(result, "sequences", result)[0, prompt.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def answer_options(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    options: Mapping[str, Any],
    usual: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of ``generate`` for one answer to ``prompt [1, T]``.

    What the model's author set, and a cache of ours contradicts, is left out, with a warning.

    Args:
        model: that answers.
        tokenizer: of the model; its own stop strings need it.
        prompt: all of it is text, also where it has ids of padding.
        options: the caller's.
        usual: what holds where ``options`` don't say; a ``generation_config`` says it all but the
            cache, and a length that it doesn't name.

    Raises:
        ValueError: several beams or answers, or another cache.
    """
    own = options.get("generation_config")
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or getattr(own, name, None) or 1) > 1:
            raise ValueError(f"{name}: the cache holds one text, ask for one answer of one beam")
    if options.keys() & CACHE_NAMES:
        raise ValueError("this text has a cache of its own: leave past_key_values out")
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "tokenizer": tokenizer}
    plain, dropped = plain_generation_config(model)
    if dropped := [name for name in dropped if getattr(own, name, None) is None]:
        # An argument of the call is the only thing that the model's defaults give way to.
        arguments |= {name: getattr(plain, name) for name in dropped}
        _log.warning("left out of the model's generation_config: %s", ", ".join(dropped))
    names, lengths = set(usual), ("max_length", "max_new_tokens")
    if own is not None:
        names &= {"past_key_values", "max_new_tokens"}
    # Whoever names a length means no other one.
    if any(options.get(name) or getattr(own, name, None) for name in lengths):
        names.discard("max_new_tokens")
    return {**arguments, **{name: usual[name] for name in names}, **options}


def positions(model: PreTrainedModel) -> tuple[int, bool]:
    """How many positions a model has, 0: nobody knows; whether it can't go beyond them.

    Learned positions, and sines in a table, end. RoPE goes on, where no training has been.
    """
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or 0
    decoder = decoder_of(model)
    tables = [
        tensor.shape[0]
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
        if tensor.ndim == 2 and re.search("pos|wpe", name)
    ]
    # OPT's has two rows more.
    return most, any(most <= length <= most + 8 for length in tables)


def around_message(
    tokenizer: PreTrainedTokenizerBase, lead: str = "", trail: str = ""
) -> tuple[str, str]:
    """The texts that the chat template puts before and after a user's message; BOS is left out.

    ``lead`` and ``trail`` are the blanks around the message, of which the texts have what the
    template leaves. A tokenizer without a template leaves them as they are.

    Raises:
        ValueError: a template that fails, or doesn't show the message once and as it is.
    """
    if not tokenizer.chat_template:
        return lead, trail
    before, place, after = _shown(tokenizer, f"{lead}{_PLACE}{trail}").partition(_PLACE)
    if not place or _PLACE in after:
        raise ValueError(
            "the chat template doesn't show a message once and as it is: give the tokenizer "
            "another one (a chat_template.jinja in the model's folder), or take its own away"
        )
    bos = tokenizer.bos_token
    return (before.removeprefix(str(bos)) if bos else before), after


def _shown(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """What the chat template makes of a message, given as text or, where it needs that, as a part.

    Templates of models that see read ``content`` as a list of texts and pictures.
    """
    shown, fault = "", None
    for given in (content, [{"type": "text", "text": content}]):
        message, how = [{"role": "user", "content": given}], {"add_generation_prompt": True}
        if _PLACE not in shown:
            try:
                shown = str(tokenizer.apply_chat_template(message, tokenize=False, **how))
            except (TemplateError, TypeError) as error:
                fault = fault or error
    if not shown:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} can't show a single message of a "
            f"user ({fault}): give the tokenizer another one, or set tokenizer.chat_template = None"
        ) from fault
    return shown


def _message(
    tokenizer: PreTrainedTokenizerBase, text: str, before: str = "", after: str = ""
) -> list[int]:
    """The tokens of ``text`` between parts of a template; control tokens are in these alone."""
    whole, first, last = (_encode(tokenizer, one) for one in (before + text + after, before, after))
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    control = {number for number, token in added if token.special}
    if sum(map(control.__contains__, whole)) == sum(map(control.__contains__, first + last)):
        return whole
    return [*first, *_encode(tokenizer, text, split_special_tokens=True), *last]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, **how: Any) -> list[int]:
    """The tokens of a text, none added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"])
