"""Questions to a document that a cache has read."""

from __future__ import annotations

from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from hf_kvret.cache import RetrievalCache

_PLACE = "PUT THE PROMPT HERE"


def document_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """``[1, T]`` token ids of a document as `ask` expects it in a cache.

    It begins the user's message where the tokenizer has a chat template, else the whole text.
    Names of control tokens in it, as ``<|im_end|>``, are read as text.

    Raises:
        ValueError: a chat template that can't be used, see `around_message`.
    """
    before, _ = around_message(tokenizer)
    bos = tokenizer.bos_token_id
    begins = tokenizer("", verbose=False)["input_ids"][:1]
    if tokenizer.chat_template:
        begins = _encode(tokenizer, _shown(tokenizer))[:1]
    # Where neither the tokenizer nor its template begins with one, generate's users have none.
    first = [bos] if bos is not None and begins == [bos] else []
    return torch.tensor([[*first, *_message(tokenizer, text, before=before)]], dtype=torch.long)


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
        **options: of ``generate``, as ``streamer``; 512 new tokens at most and greedy, unless they
            or a ``generation_config`` are given. One answer of one beam.

    Raises:
        TypeError: another cache.
        ValueError: an empty question, a cache without the ids of one sequence, several beams or
            answers, a chat template that can't be used.
    """
    if not isinstance(cache, RetrievalCache):
        raise TypeError(
            f"cache is a {type(cache).__name__}: pass one of hf_kvret, as hf_kvret.ParisKVCache"
        )
    if max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1) > 1:
        raise ValueError("the cache holds one sequence: ask for one answer of one beam")
    ids = cache.input_ids
    if ids is None or len(ids) != 1:
        raise ValueError(
            "the cache doesn't hold one document whose tokens it saw: read hf_kvret.document_ids("
            "tokenizer, text) into it"
        )
    if not question.strip():
        raise ValueError("there is no question: write one")
    _, after = around_message(tokenizer)
    behind = torch.tensor([_message(tokenizer, f"\n\n{question}", after=after or "\n")])
    prompt = torch.cat([ids.cpu(), behind], dim=1).to(model.device)
    # A fork serves layers that can't go back, too.
    usual: dict[str, Any] = {"past_key_values": cache.fork()}
    # Without a mask generate would mask padding tokens that a document contains.
    usual["attention_mask"] = torch.ones_like(prompt)
    if "generation_config" not in options:
        usual |= {"max_new_tokens": 512, "do_sample": False}
    generate: Any = model.generate
    result = generate(prompt, **{**usual, **options})
    tokens = getattr(result, "sequences", result)[0, prompt.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def around_message(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The texts that the chat template puts before and after a user's message; BOS is left out.

    Empty ones for a tokenizer without a template. The message is not given to the template itself,
    as some would strip its blanks.

    Raises:
        ValueError: a template that fails, or doesn't show the message once and as it is.
    """
    if not tokenizer.chat_template:
        return "", ""
    before, place, after = _shown(tokenizer).partition(_PLACE)
    if not place or _PLACE in after:
        raise ValueError(
            "the chat template doesn't show a message once and as it is: give the tokenizer "
            "another one, or set tokenizer.chat_template = None"
        )
    bos = tokenizer.bos_token
    return (before.removeprefix(str(bos)) if bos else before), after


def _shown(tokenizer: PreTrainedTokenizerBase) -> str:
    message, how = [{"role": "user", "content": _PLACE}], {"add_generation_prompt": True}
    try:
        return str(tokenizer.apply_chat_template(message, tokenize=False, **how))
    except TemplateError as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} can't show a single message of a "
            f"user ({error}): give the tokenizer another one, or set tokenizer.chat_template = None"
        ) from error


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
